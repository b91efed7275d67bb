"""The end of a sweep: which checkpoint is best, what is saved with it, and what bad input leaves."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.checkpoints import own_scores, scale_head
from tests.runs import colour_pairs, words, write_rows
from vlmrm import cli
from vlmrm.errors import BelowThreshold, CheckpointError, VlmrmError
from vlmrm.evaluation import evaluate as evaluate_module
from vlmrm.evaluation import sweep as sweep_module
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.evaluation.schema import load_results
from vlmrm.evaluation.sweep import sweep
from vlmrm.modeling import verify_complete


def scaled(model: Path, folder: Path, factor: float) -> None:
    """A checkpoint of the model with its scores times `factor`."""
    shutil.copytree(model, folder)
    scale_head(folder, factor, step=1)


@pytest.fixture
def run_folder(tmp_path, monkeypatch, tiny_reward_model) -> Path:
    """A finished training: checkpoint-1 prefers the opposite of the others, of which -2 is as sure as -3 is not."""
    monkeypatch.chdir(tmp_path)
    for step, factor in {1: -1.0, 2: 3.0, 3: 1.0}.items():
        scaled(tiny_reward_model, Path("run", f"checkpoint-{step}"), factor)
    scaled(tiny_reward_model, Path("run", "final"), 1.0)
    return Path("run")


@pytest.fixture
def data(tmp_path) -> Path:
    return colour_pairs(tmp_path / "data", 6, category=["plain", "hard"] * 3)


def asked(run_folder, data, **keys) -> list[str]:
    keys = {"output_file": "results.csv", "interventions": "none", **keys}
    return words(model_dirs=run_folder, dataset_path=data, **keys)


def column(name: str) -> dict[str, str]:
    with open("results.csv", newline="") as file:
        return {row["checkpoint"]: row[name] for row in csv.DictReader(file)}


def steps(folder: Path = Path("run")) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Choosing ------------------------------------------------------------------------------------------------------------


def test_the_best_is_by_the_requested_metric(run_folder, data, monkeypatch, capsys):
    first = sweep(asked(run_folder, data))
    assert first.choice and first.choice["value"] == max(row["preference_accuracy"] for row in first.rows)
    monkeypatch.setattr(sweep_module, "evaluate_entry", lambda *_: pytest.fail("everything has its row"))
    by_loss = sweep(asked(run_folder, data, metric_for_best="loss"))
    least = min(by_loss.rows, key=lambda row: row["loss"])
    assert by_loss.best is least
    written = load_results("results.json")["best"]
    without_luck = written.pop("without_luck")
    assert without_luck["low"] <= without_luck["value"] <= without_luck["high"]
    assert written == {
        "metric": "loss",
        "value": least["loss"],
        "model": "run",
        "checkpoint": least["checkpoint"],
        "path": least["path"],
    }
    assert [name for name, best in column("best").items() if best == "True"] == [least["checkpoint"]]
    cli.evaluate(*asked(run_folder, data, metric_for_best="accuracy/hard"))
    hard = max(row["statistics"]["category"]["hard"]["preference_accuracy"]["value"] for row in first.rows)
    assert f"with accuracy/hard {hard:.4f}" in capsys.readouterr().out


def test_fail_under_is_of_the_metric(run_folder, data):
    margin = max(row["average_margin"] for row in sweep(asked(run_folder, data)).rows)
    keys = {"metric_for_best": "average_margin"}
    assert sweep(asked(run_folder, data, **keys, fail_under=margin)).best is not None
    with pytest.raises(BelowThreshold, match="average_margin is below"):
        sweep(asked(run_folder, data, **keys, fail_under=margin + 0.1))


# The scale of scores -------------------------------------------------------------------------------------------------


def test_score_mean_and_spread_are_saved_with_best(run_folder, data):
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    result = sweep(asked(run_folder, data))
    assert result.choice is not None
    best = Path(result.choice["path"])
    scores = np.array(own_scores(best, data))
    info = json.loads((best / "reward_model.json").read_text())
    assert info["reward_mean"] == pytest.approx(scores.mean(), abs=1e-5)
    assert info["reward_std"] == pytest.approx(scores.std(), abs=1e-5)
    assert (info["reward_count"], info["reward_data"]) == (12, load_results("results.json")["settings"]["data"])
    assert set(verify_complete(best)["files"]) == {
        path.relative_to(best).as_posix() for path in before if path.parent == best and path.name != "COMPLETE.json"
    }
    after = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {best / "reward_model.json", best / "COMPLETE.json"} and after.keys() == before.keys()


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"benchmark": "vl-rewardbench"}])
def test_absent_data_are_refused_before_anything_is_written(run_folder, capsys, keys):
    with pytest.raises(SystemExit, match="3"):
        cli.run(lambda: cli.evaluate(*asked(run_folder, "absent.jsonl", **keys)))
    assert "absent.jsonl does not exist" in capsys.readouterr().err and not Path("results.csv").exists()


@pytest.mark.parametrize(
    ("keys", "code", "said"), [({"data": "empty.jsonl"}, 3, "no rows"), ({"group_by": "language"}, 2, "group_by")]
)
def test_unusable_data_become_the_error_of_every_row(run_folder, data, capsys, keys, code, said):
    write_rows(Path("empty.jsonl"), [])
    words = asked(run_folder, **{"data": data, **keys})
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: cli.evaluate(*words))
    printed = capsys.readouterr().err
    assert stopped.value.code == code and said in printed and "Traceback" not in printed
    errors = column("error")
    assert len(errors) == 3 and all(said in error for error in errors.values())
    assert len(sweep(asked(run_folder, data)).rows) == 3, "what was mended is evaluated into the same file"
    before = Path("results.json").read_bytes()
    with pytest.raises(VlmrmError, match=said):
        sweep(words)
    assert Path("results.json").read_bytes() == before, "figures are never replaced by an error"


def test_a_nonfinite_score_is_reported_as_a_row(run_folder, data, tiny_reward_model, capsys):
    shutil.rmtree(run_folder / "checkpoint-2")
    scaled(tiny_reward_model, run_folder / "checkpoint-2", math.nan)
    with pytest.raises(CheckpointError, match="1 of 3 could not be evaluated"):
        cli.evaluate(*asked(run_folder, data))
    errors = column("error")
    assert errors.pop("checkpoint-2").startswith("row pair-0: its score is nan: look for broken weights")
    assert set(errors.values()) == {""} and "best: run/checkpoint-" in capsys.readouterr().out


def test_a_checkpoint_without_enough_memory_is_a_row(run_folder, data, monkeypatch):
    class Full:
        device = torch.device("cpu")

        def __call__(self, **inputs):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    def evaluated(scorer, *args, description, **keys):
        with monkeypatch.context() as patch:  # the next checkpoint has the same engine
            if description == "checkpoint-2":
                patch.setattr(scorer.engine, "model", Full())
            return evaluate(scorer, *args, description=description, **keys)

    monkeypatch.setattr(evaluate_module, "evaluate", evaluated)
    errors = [row["error"] for row in sweep(asked(run_folder, data)).rows]
    assert "Tried to allocate 2 GiB: lower eval_batch_size" in (errors.pop(1) or "") and errors == [None, None]
