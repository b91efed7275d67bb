"""A sweep: every checkpoint in natural order, one row each, whatever happens to the checkpoints or the process."""

from __future__ import annotations

import csv
import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from tests.evaluation.checkpoints import own_scores, scale_head
from tests.runs import colour_pairs, finish, square, start, words, write_rows
from vlmrm import cli
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import data_fingerprint, load_train_and_eval
from vlmrm.errors import ConfigError
from vlmrm.evaluation import evaluate as evaluate_module
from vlmrm.evaluation import sweep as sweep_module
from vlmrm.evaluation.schema import load_results
from vlmrm.evaluation.scorers import checkpoint as checkpoint_module
from vlmrm.evaluation.sweep import checkpoints_of, sweep
from vlmrm.modeling import checkpoint_digest, write_complete
from vlmrm.modeling.manifest import TRAINING_LOCK


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_folder(here, tiny_reward_model) -> Path:
    """A training's folder with checkpoint-9, -10 and -100; -9 prefers what the others do not."""
    for step, factor in {100: 3.0, 9: -1.0, 10: 2.0}.items():
        folder = here / "run" / f"checkpoint-{step}"
        shutil.copytree(tiny_reward_model, folder)
        scale_head(folder, factor, step)
    return here / "run"


@pytest.fixture
def data(here) -> Path:
    """Six rows; people tied the fourth."""
    return colour_pairs(here / "data", 6, category=["plain", "hard"] * 3, tie=[i == 3 for i in range(6)])


def asked(run_folder, data, **keys) -> list[str]:
    return words(**{"model_dirs": run_folder, "dataset_path": data, "output_file": "results.csv", **keys})


def read_csv(path="results.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def break_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def test_scores_of_a_training_equal_separate_checkpoints(run_folder, data):
    keys = {"eval_batch_size": 2, "interventions": ["prompt", "blank_image"]}
    together = sweep(asked(run_folder, data, **keys))
    frames = []
    for row in together.rows:
        alone = asked(row["path"], data, output_file=f"{row['checkpoint']}.csv", **keys)
        frames.append(pd.read_parquet(sweep(alone).scores))
    numbers = pd.read_parquet(together.scores).select_dtypes("number")
    pd.testing.assert_frame_equal(numbers, pd.concat(frames, ignore_index=True)[list(numbers)], check_exact=True)


@pytest.mark.smoke
def test_every_checkpoint_has_a_row_in_natural_order(run_folder, data):
    result = sweep(asked(run_folder, data, interventions=["blank_image", "swapped_prompt"]))
    rows = read_csv()
    assert [row["checkpoint"] for row in rows] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    columns = ["model", "checkpoint", "preference_accuracy", "average_margin", "margin_std", "sample_count"]
    assert list(rows[0])[:6] == columns
    for row in rows:
        assert row["weights"] == checkpoint_digest(run_folder / row["checkpoint"])
        margins = [chosen - rejected for chosen, rejected in own_scores(run_folder / row["checkpoint"], data)]
        decided = margins[:3] + margins[4:]
        mean = sum(decided) / 5
        assert float(row["preference_accuracy"]) == sum(margin > 0 for margin in decided) / 5
        assert float(row["average_margin"]) == pytest.approx(mean, abs=1e-5)
        assert float(row["margin_std"]) == pytest.approx((sum((m - mean) ** 2 for m in decided) / 5) ** 0.5, abs=1e-5)
        assert (row["sample_count"], row["tied_pairs"], row["score_ties"]) == ("5", "1", "0")
        assert float(row["accuracy/plain"]) == sum(margin > 0 for margin in margins[::2]) / 3
        assert 0 <= float(row["blank_image_accuracy"]) <= 1
    details = json.loads(Path("results.json").read_text())
    assert [row["checkpoint"] for row in details["results"]] == [row["checkpoint"] for row in rows]
    assert details["results"][0]["statistics"]["category"]["hard"]["sample_count"] == 2
    assert result.best["preference_accuracy"] == max(float(row["preference_accuracy"]) for row in rows)
    [log] = Path("logs").glob("eval_*.log")
    assert "checkpoint-100" in log.read_text()


def test_the_details_say_where_every_figure_came_from(run_folder, data):
    [row] = sweep(asked(run_folder / "checkpoint-10", data)).rows
    details = load_results("results.json")
    [read] = details["results"]
    assert read["statistics"]["overall"]["preference_accuracy"]["n"] == row["sample_count"] == 5
    found, info = read["provenance"], json.loads((run_folder / "checkpoint-10" / "reward_model.json").read_text())
    assert found["data"] == details["settings"]["data"] == data_fingerprint([str(data)])
    assert found["chat_template_sha256"] == info["chat_template_sha256"]
    assert found["checkpoint"] == info["provenance"]
    assert (found["device"], found["dtype"], found["processes"]) == ("cpu", "float32", 1)
    assert found["versions"]["torch"] == metadata.version("torch")


def test_equal_scores_are_counted_apart_and_half(run_folder, data):
    scale_head(run_folder / "checkpoint-9", 0.0, 9)
    [row] = sweep(asked(run_folder / "checkpoint-9", data)).rows
    assert (row["preference_accuracy"], row["score_ties"], row["sample_count"]) == (0.5, 5, 5)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"eval_dataset_path": "nope.jsonl"}, "eval_dataset_path is a key of training"),
        ({"critique_weight": 0.5}, "critique_weight is a key of training"),
        ({"eval_fraction": 0.5, "dataset_weights": [2]}, "dataset_weights are of the rows that are trained on"),
        ({"eval_fraction": 0.5, "train_data": "data/pairs.jsonl"}, r"train_data names data/pairs\.jsonl"),
        ({"benchmark": "hpdv2", "eval_fraction": 0.5}, "eval_fraction does not go with benchmark"),
        ({"benchmark": "hpdv2", "dataset_path": ["a", "b"]}, "2 copies"),
    ],
)
def test_data_keys_that_would_be_ignored_are_refused(keys, reason, run_folder, data):
    with pytest.raises(ConfigError, match=reason):
        sweep(asked(run_folder, "data/pairs.jsonl", **keys))
    assert not Path("results.csv").exists()


def test_rows_that_a_training_held_out_are_evaluated(run_folder, here):
    data = colour_pairs(here / "many", 24, prompt=[f"Which colour is square {i}?" for i in range(24)])
    keys = {"eval_fraction": 0.25, "split_seed": 3}
    _, held_out = load_train_and_eval(DataArguments(dataset_path=[str(data)], **keys))
    sweep(asked(run_folder / "checkpoint-10", data, interventions="none", **keys))
    assert 0 < len(held_out) < 24
    scored = pd.read_parquet("results.scores.parquet")
    assert set(scored["comparison_id"]) == {row["comparison"].id for row in held_out}


def test_a_broken_checkpoint_sets_row_and_exit_code(run_folder, data, capsys):
    break_weights(run_folder / "checkpoint-10")
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.evaluate(*asked(run_folder, data)))
    said = capsys.readouterr()
    assert stopped.value.code == 4
    assert "error: 1 of 3 could not be evaluated" in said.err and "Traceback" not in said.err
    assert "best: " in said.out
    rows = read_csv()
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert "model.safetensors" in rows[1]["error"] and rows[1]["preference_accuracy"] == ""


def test_a_killed_sweep_continues_and_retries_failures(run_folder, data, here, monkeypatch):
    shutil.copytree(run_folder / "checkpoint-9", here / "whole")
    break_weights(run_folder / "checkpoint-9")
    measure, measured = evaluate_module.measure, []

    def killed(entry, *about):
        if entry.checkpoint == "checkpoint-100":
            raise KeyboardInterrupt
        return measure(entry, *about)

    monkeypatch.setattr(evaluate_module, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(asked(run_folder, data))
    assert [row["checkpoint"] for row in read_csv()] == ["checkpoint-9", "checkpoint-10"]

    def watched(entry, *about):
        measured.append(entry.checkpoint)
        return measure(entry, *about)

    monkeypatch.setattr(evaluate_module, "measure", watched)
    shutil.rmtree(run_folder / "checkpoint-9")
    (here / "whole").rename(run_folder / "checkpoint-9")
    rows = sweep(asked(run_folder, data)).rows
    assert measured == ["checkpoint-9", "checkpoint-100"]
    assert {row["checkpoint"] for row in rows} == {"checkpoint-9", "checkpoint-10", "checkpoint-100"}
    assert len(rows) == 3 and not any(row["error"] for row in rows)


def test_a_second_sweep_into_one_output_is_refused(run_folder, data, monkeypatch):
    """As of one per GPU: each would write the rows that it knows, without the other's."""
    evaluate_entry = evaluate_module.evaluate_entry

    def meanwhile(*about):
        with pytest.raises(ConfigError, match=r"results\.csv is being written"):
            sweep(asked(run_folder / "checkpoint-100", data, output_file="../" + Path.cwd().name + "/results.csv"))
        return evaluate_entry(*about)

    with monkeypatch.context() as patch:
        patch.setattr(sweep_module, "evaluate_entry", meanwhile)
        sweep(asked(run_folder / "checkpoint-9", data))
    assert [row["checkpoint"] for row in read_csv()] == ["checkpoint-9"]
    sweep(asked(run_folder / "checkpoint-100", data))
    assert [row["checkpoint"] for row in read_csv()] == ["checkpoint-9", "checkpoint-100"]


def test_a_sweep_under_kill_leaves_whole_files(run_folder, data, here):
    process = start(["eval_rm.py"], *asked(run_folder, data), cwd=here)
    assert process.stdout is not None
    for line in process.stdout:
        if "checkpoint-9: accuracy" in line:
            process.kill()
            break
    process.communicate()
    done = [row["checkpoint"] for row in json.loads(Path("results.json").read_text())["results"]]
    assert done[0] == "checkpoint-9"
    assert [row["checkpoint"] for row in read_csv()] in (done, done[:-1])
    assert len(sweep(asked(run_folder, data)).rows) == 3


def test_results_of_other_data_or_settings_stay_apart(run_folder, data, here):
    sweep(asked(run_folder / "checkpoint-9", data))
    before = Path("results.json").read_bytes()
    other = colour_pairs(here / "other", 4)
    for key, value in {"dataset_path": other, "max_eval_samples": 3, "dtype": "bfloat16", "max_pixels": 5000}.items():
        with pytest.raises(ConfigError, match=f"other data or settings .*{key}"):
            sweep(asked(run_folder, data, **{key: value}))
    assert Path("results.json").read_bytes() == before


def test_altered_weight_bytes_are_an_error_not_scores(run_folder, data):
    weights = run_folder / "checkpoint-10" / "model.safetensors"
    assert [row["error"] for row in sweep(asked(run_folder, data)).rows] == [None] * 3
    size = weights.stat().st_size
    with open(weights, "r+b") as file:
        file.seek(size // 2)
        altered = bytes(byte ^ 1 for byte in file.read(4000))
        file.seek(size // 2)
        file.write(altered)
    assert weights.stat().st_size == size
    for output in ("results.csv", "new.csv"):
        errors = {row["checkpoint"]: row["error"] for row in sweep(asked(run_folder, data, output_file=output)).rows}
        assert "bytes of model.safetensors were changed" in (errors.pop("checkpoint-10") or "")
        assert set(errors.values()) == {None}


def test_a_checkpoint_trained_again_is_evaluated_again(run_folder, data, monkeypatch):
    before = {row["checkpoint"]: row["average_margin"] for row in sweep(asked(run_folder, data)).rows}
    scale_head(run_folder / "checkpoint-10", -1.0, step=10)
    load, loaded = checkpoint_module.load_checkpoint, []
    monkeypatch.setattr(
        checkpoint_module, "load_checkpoint", lambda it, **keys: loaded.append(it.name) or load(it, **keys)
    )
    after = {row["checkpoint"]: row["average_margin"] for row in sweep(asked(run_folder, data)).rows}
    assert after == pytest.approx(before | {"checkpoint-10": -before["checkpoint-10"]})
    assert {*loaded} == {"checkpoint-10"}
    assert pd.read_parquet("results.scores.parquet").groupby("checkpoint").size().tolist() == [6, 6, 6]


def test_base_model_path_gives_an_adapter_its_base(here, data, train_here, tiny_checkpoint):
    base = here / "base"
    shutil.copytree(tiny_checkpoint, base)
    train_here(data, "lora", model=base, use_peft=True, save_steps=5)
    [there] = sweep(asked(here / "lora", data)).rows
    base.rename(here / "moved")
    [gone] = sweep(asked(here / "lora", data, output_file="gone.csv")).rows
    assert str(base) in gone["error"]
    [moved] = sweep(asked(here / "lora", data, base_model_path=here / "moved", output_file="moved.csv")).rows
    assert moved["error"] is None
    assert moved["average_margin"] == pytest.approx(there["average_margin"], abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dataset_path": "data/pairs.jsonl"}, "model_dirs is missing"),
        ({"model_dirs": "run"}, "dataset_path is missing"),
        ({"model_dirs": "absent", "dataset_path": "data/pairs.jsonl"}, "absent has no checkpoints"),
        ({"model_dirs": "run", "dataset_path": "data/pairs.jsonl", "checkpoint_pattern": "epoch-*"}, r"epoch-\*"),
        ({"model_dirs": "run", "dataset_path": "data/pairs.jsonl", "output_file": "results.txt"}, r"\.csv"),
    ],
)
def test_nothing_to_evaluate_is_an_error_saying_why(keys, said, run_folder, data):
    with pytest.raises(ConfigError, match=said):
        sweep(words(**keys))
    assert not Path("results.json").exists()


def test_two_processes_score_as_one_does(run_folder, data, here):
    two = start(
        ["eval_rm.py"], *asked(run_folder, data, output_file="two.csv", eval_batch_size=2), cwd=here, processes=2
    )
    sweep(asked(run_folder, data, output_file="one.csv", eval_batch_size=2))
    finish(two)
    pd.testing.assert_frame_equal(pd.read_parquet("two.scores.parquet"), pd.read_parquet("one.scores.parquet"))
    saved = [json.loads(Path(name).read_text())["results"] for name in ("one.json", "two.json")]
    passing = ("seconds", "provenance")
    one, other = ([{k: v for k, v in row.items() if k not in passing} for row in rows] for rows in saved)
    assert one == other


def test_a_public_benchmark_is_scored_beside_published_figures(run_folder, here, capsys):
    rows = [
        {
            "id": f"{'RLAIF-V' if i % 2 else 'mathverse'}-{i}",
            "query": "What colour?",
            "response": ["It is red.", f"It is {colour}."],
            "image": square(here, i),
            "human_ranking": [i % 2, 1 - i % 2],
        }
        for i, colour in enumerate(["blue", "green", "white", "black"])
    ]
    copy = write_rows(here / "copy.jsonl", rows)
    result = sweep(asked(run_folder / "checkpoint-9", copy, benchmark="vl-rewardbench", interventions="none"))
    [row] = result.rows
    overall = row["benchmark"]["overall"]
    assert overall["low"] <= overall["value"] == row["preference_accuracy"] <= overall["high"]
    assert (overall["n"], overall["clusters"]) == (4, 4)
    assert float(read_csv()[0]["benchmark/overall"]) == row["preference_accuracy"]
    printed = capsys.readouterr().err
    assert "checkpoint-9" in printed and "GPT-4o" in printed


def test_a_sweep_beside_training_skips_unfinished_checkpoints(tmp_path, caplog):
    one, two = both = [tmp_path / f"checkpoint-{step}" for step in (1, 2)]
    for folder in both:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    write_complete(one, world_size=1, step=1)
    args: Any = SimpleNamespace(checkpoint_pattern="checkpoint-*")
    assert checkpoints_of(str(tmp_path), args) == both  # of a download, no one knows whether it is whole
    (tmp_path / TRAINING_LOCK).touch()
    with caplog.at_level("WARNING", "vlmrm"):
        assert checkpoints_of(str(tmp_path), args) == [one]
    assert f"{two} is left out" in caplog.text
