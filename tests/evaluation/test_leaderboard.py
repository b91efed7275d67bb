"""The leaderboard: results of any runs merge where they are of the same data, and nothing is put together silently."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pair_frames import pair_frame

from benchmarks.browser import CHROMIUM, Browser
from vlmrm import cli
from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.leaderboard import build_leaderboard, leaderboard, page
from vlmrm.evaluation.schema import SCHEMA_VERSION, dump_results
from vlmrm.measures.pairs import credits_of

MODELS = {"good": 0.9, "fair": 0.75, "poor": 0.55}


def margins_of(model: str, seed: int, count: int) -> np.ndarray:
    return np.where(np.random.default_rng([seed, len(model), ord(model[0])]).random(count) < MODELS[model], 1.0, -1.0)


def frame_of(model: str, data: int, count: int = 200, **columns) -> pd.DataFrame:
    """Pairs of a data set, the same of every model but for the scores."""
    names = [f"{data}-{i}" for i in range(count)]
    texts = {"prompt_text": names, "chosen_text": "yes", "rejected_text": [f"no {i}" for i in range(count)]}
    made = pair_frame(margins_of(model, data, count), model=f"runs/{model}", comparison_id=names, **texts)
    return made.assign(prompt_id=[f"{data}/{i // 2}" for i in range(count)]).assign(**columns)


def write_results(path: Path, frames, *, data="1", benchmark=None, date="2026-11-21T03:00:00Z", **changed) -> Path:
    """Write what a sweep would of these scored pairs."""
    rows = []
    for frame in frames:
        model, checkpoint = frame["model"].iloc[0], frame["checkpoint"].iloc[0]
        accuracy = float(np.nanmean(credits_of(frame["chosen_score"].to_numpy(float))))
        figure = {"value": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "standard_error": 0.02}
        figure |= {"n": len(frame), "prompts": 100}
        overall = {"preference_accuracy": figure, "sample_count": len(frame)}
        provenance = {"date": date, "git_commit": None, "versions": {}, "data": data, "weights": f"weights of {model}"}
        provenance |= {
            "device": "cpu",
            "dtype": "float32",
            "attention": "",
            "chat_template_sha256": "",
            "processes": 1,
        }
        provenance |= {"checkpoint": {}} | changed.get("provenance", {})
        row = {
            "model": model,
            "checkpoint": checkpoint,
            "path": f"{model}/{checkpoint}",
            "error": None,
            "seconds": 1.0,
        }
        row |= {"statistics": {"overall": overall, "category": {}, "by": {}}, "provenance": provenance}
        rows.append(row | ({"benchmark": {"overall": figure, "macro": figure | {"value": 0.5}}} if benchmark else {}))
    settings = {
        "data": data,
        "benchmark": benchmark,
        "reading": {"dataset_path": [changed.get("source", "tests/it.jsonl")]},
    }
    content = {"schema_version": SCHEMA_VERSION, "settings": settings, "leakage": None, "best": None, "results": rows}
    content |= {"set_name": changed["set_name"]} if "set_name" in changed else {}
    path.with_suffix(".json").write_text(dump_results(content))
    pd.concat(frames).to_parquet(path.with_suffix(".scores.parquet"))
    return path.with_suffix(".csv")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Three models on two sets; `fair` lacks the second, a public benchmark."""
    folder = tmp_path_factory.mktemp("results")
    write_results(folder / "a", [frame_of(model, 1) for model in MODELS], data="1")
    write_results(
        folder / "b", [frame_of(model, 2) for model in ("good", "poor")], data="2", benchmark="vl-rewardbench"
    )
    return folder


def test_a_cell_is_the_figure_of_the_results_and_a_missing_one_is_missing(results, tmp_path):
    build_leaderboard([results], tmp_path)
    table = pd.read_csv(tmp_path / "leaderboard.csv").set_index("model")
    assert list(table.index) == ["good", "fair", "poor"]
    assert table["rank"].tolist() == [1, 2, 3]
    for model in MODELS:
        accuracy = (margins_of(model, 1, 200) > 0).mean()
        assert table.loc[model, "it"] == pytest.approx(accuracy)
        assert (table.loc[model, "it/low"], table.loc[model, "it/pairs"]) == (pytest.approx(accuracy - 0.05), 200)
    assert np.isnan(table.loc["fair", "vl-rewardbench"])
    assert table.loc["poor", "vl-rewardbench"] == pytest.approx((margins_of("poor", 2, 200) > 0).mean())
    details = json.loads((tmp_path / "leaderboard.json").read_text())
    assert [model["model"] for model in details["models"]][:3] == ["good", "fair", "poor"]
    assert details["models"][1]["figures"].keys() == {"it"}
    assert {it["name"]: it["metric"] for it in details["sets"]} == {
        "it": "preference_accuracy",
        "vl-rewardbench": "overall",
    }
    assert details["prompts"] == 200


def test_the_ranking_is_of_the_pairs_that_are_shared(results):
    """`fair` has no figure on the second set; there the others meet alone."""
    board = leaderboard([results])
    good, fair, poor = (line.standing for line in board.lines[:3])
    assert (good.strength.n, fair.strength.n, poor.strength.n) == (400, 200, 400)
    assert good.group != poor.group and good.worst_rank <= 2


def test_a_large_set_outweighs_a_small_one_unless_sets_are_equal(tmp_path):
    def score(frame, right):
        return frame.assign(chosen_score=np.where(np.arange(len(frame)) % 10 < right, 1.0, -1.0))

    large = [score(frame_of(model, 1, 400), right) for model, right in (("good", 6), ("poor", 7))]
    small = [score(frame_of(model, 2, 40), right) for model, right in (("good", 9), ("poor", 5))]
    write_results(tmp_path / "large", large, data="1")
    write_results(tmp_path / "small", small, data="2", source="small.jsonl")
    assert [line.model for line in leaderboard([tmp_path]).lines] == ["poor", "good"]
    assert [line.model for line in leaderboard([tmp_path], equal_sets=True).lines] == ["good", "poor"]


def test_results_of_several_machines_are_one_column(tmp_path):
    first = write_results(tmp_path / "a", [frame_of("good", 1)], data="1")
    second = write_results(tmp_path / "b", [frame_of("poor", 1)], data="1", source="elsewhere/copy.jsonl")
    third = write_results(tmp_path / "c", [frame_of("fair", 1)], data="of another file", source="tests/it.jsonl")
    board = leaderboard([first, second, third])
    assert [it.name for it in board.sets] == ["it"]
    assert [line.model for line in board.lines] == ["good", "fair", "poor"]
    assert board.notes == []


@pytest.mark.parametrize("same_files", [True, False])
def test_other_labels_or_answers_are_a_column_of_their_own(tmp_path, same_files):
    first = write_results(tmp_path / "a", [frame_of("good", 1)])
    flipped = frame_of("poor", 1).assign(chosen_text=["yes"] * 199 + ["no"])
    second = write_results(tmp_path / "b", [flipped], data="1" if same_files else "2")
    board = leaderboard([first, second])
    assert [it.name for it in board.sets] == ["it", "it (200 pairs)"]
    [note, apart] = board.notes
    assert "b.json is not of the same data as the other results of it" in note
    assert "of its 200 pairs 199 are among their 200, and 1 more with other answers" in note
    assert "cannot be ranked" in apart
    assert [sum(figure is not None for figure in line.figures) for line in board.lines] == [1, 1]


def test_a_sample_is_not_the_whole(tmp_path):
    whole = write_results(tmp_path / "a", [frame_of("good", 1)])
    sample = write_results(tmp_path / "b", [frame_of("poor", 1)[:50]], data="of the sample")
    board = leaderboard([whole, sample])
    assert [it.name for it in board.sets] == ["it", "it (50 pairs)"]


def test_rows_that_one_model_could_not_use_leave_the_column_one(tmp_path):
    first = write_results(tmp_path / "a", [frame_of("good", 1)])
    second = write_results(tmp_path / "b", [frame_of("poor", 1)[:150]])
    board = leaderboard([first, second])
    assert [it.name for it in board.sets] == ["it"]
    assert any("On it fewer than the 200 pairs were scored of poor" in note for note in board.notes)
    assert "of 150 pairs" in page(board, "x")


def test_of_two_figures_of_a_model_the_newest_counts_with_a_word(tmp_path):
    old = write_results(tmp_path / "old", [frame_of("good", 1), frame_of("poor", 1)])
    again = frame_of("good", 1).assign(chosen_score=-1.0)
    new = write_results(tmp_path / "new", [again], date="2026-11-22T03:00:00Z")
    for order in ([old, new], [new, old]):
        board = leaderboard(order)
        [found] = [line.figures for line in board.lines if line.model == "good"]
        assert found[0].value == 0.0
        assert any("new.json, of 2026-11-22T03:00:00Z, are taken" in note for note in board.notes)


def test_two_functions_of_a_module_are_two_scorers(tmp_path):
    frames = [frame_of(model, 1).assign(model="python:mine", checkpoint=model) for model in ("good", "poor")]
    path = write_results(tmp_path / "a", frames, provenance={"weights": "of the module"})
    content = path.with_suffix(".json").read_text().replace("python:mine/", "python:mine.")
    path.with_suffix(".json").write_text(content)
    assert [line.model for line in leaderboard([path]).lines] == ["python:mine.good", "python:mine.poor"]


def test_a_scorer_with_other_weights_is_told_apart_by_them(tmp_path):
    frame = frame_of("good", 1).assign(model="judge:host", checkpoint="m")
    paths = [write_results(tmp_path / name, [frame], provenance={"weights": f"{name}23456789"}) for name in "ab"]
    assert {line.model for line in leaderboard(paths).lines} == {"judge:host/m", "judge:host/m [b23456]"}


def test_a_set_with_dots_in_its_name_is_read_from_its_folder(tmp_path):
    write_results(tmp_path / "plain.csv", [frame_of("good", 1)], set_name="plain")
    dotted = write_results(tmp_path / "v1.2.csv", [frame_of("good", 2)], data="2", set_name="v1.2", source="b.jsonl")
    assert [it.name for it in leaderboard([tmp_path]).sets] == ["plain", "v1.2"]
    assert [it.name for it in leaderboard([dotted, tmp_path / "v1.2.scores.parquet"]).sets] == ["v1.2"]


def test_equal_weights_are_one_model_whatever_their_folder(tmp_path):
    first = write_results(tmp_path / "a", [frame_of("good", 1)], provenance={"weights": "w"})
    moved = frame_of("good", 2).assign(model="elsewhere/good")
    second = write_results(tmp_path / "b", [moved], data="2", source="other.jsonl", provenance={"weights": "w"})
    board = leaderboard([first, second])
    [line] = board.lines
    assert line.figures[0] and line.figures[1]
    assert any("are the same model, by their weights" in note for note in board.notes)
    assert "No two models were measured on the same pairs" in page(board, "x")


def test_a_name_tells_checkpoints_and_trainings_apart(tmp_path):
    frames = [
        frame_of("good", 1).assign(model=f"runs/{run}", checkpoint=f"checkpoint-{step}")
        for run in ("a", "b")
        for step in (1, 2)
    ]
    for frame, skill in zip(frames, MODELS.values(), strict=False):
        frame["chosen_score"] += skill
    path = write_results(tmp_path / "a", frames)
    content = json.loads(path.with_suffix(".json").read_text())
    for number, row in enumerate(content["results"]):
        row["provenance"]["weights"] = str(number)
    path.with_suffix(".json").write_text(json.dumps(content))
    assert {line.model for line in leaderboard([path]).lines} == {f"{r}/checkpoint-{s}" for r in "ab" for s in (1, 2)}
    content["best"] = {"metric": "preference_accuracy", "one_standard_error": False, "value": 1.0, "model": "runs/b"}
    content["best"] |= {
        "checkpoint": "checkpoint-2",
        "path": "runs/b/checkpoint-2",
        "without_luck": None,
    }
    path.with_suffix(".json").write_text(json.dumps(content))
    assert [line.model for line in leaderboard([path], best_only=True).lines] == ["b/checkpoint-2"]


def test_published_figures_stand_under_their_own_metric_and_have_no_rank(results):
    lines = [line for line in leaderboard([results]).lines if line.source]
    by_model = {line.model: line for line in lines}
    assert by_model["GPT-4o"].figures[1].value == pytest.approx(0.658)
    assert by_model["GPT-4o"].figures[0] is None and by_model["GPT-4o"].standing is None
    assert "BaseReward paper" in by_model["GPT-4o"].source
    assert [model for model in by_model if model.startswith("GPT-4o")] == ["GPT-4o"]


def test_the_page_runs_its_own_script_alone_and_loads_nothing(results, tmp_path):
    html = build_leaderboard([results], tmp_path, title="A <b> & c").read_text()
    assert "A &lt;b&gt; &amp; c" in html
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'" in html
    assert not re.search(r"https?://", html)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_readers_sort_it_and_hide_what_others_published(results, tmp_path):
    """Two clicks on the last set: the lowest first, and those without a figure last."""
    page = build_leaderboard([results], tmp_path / "out")
    rows = "[...document.querySelectorAll('tbody tr')].filter((row) => row.checkVisibility())"
    names = f"{rows}.map((row) => row.cells[0].dataset.value)"
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        assert browser.evaluate(names)[:3] == ["good", "fair", "poor"]
        for _ in range(2):
            browser.click("thead th:last-child button")
        order = browser.evaluate(names)
        assert order[0] == "Qwen2.5-VL-7B-Instruct" and order[-1] == "fair"
        assert browser.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
        browser.click("#published")
        assert browser.evaluate(names) == ["poor", "good", "fair"]
        browser.evaluate("document.querySelector('thead button').focus()")
        browser.press("Enter")
        assert browser.evaluate(names) == ["fair", "good", "poor"]
        assert browser.complaints == []


def test_what_cannot_be_merged_is_said_in_a_sentence(results, tmp_path, capsys):
    def refusal(*sources, kind=ConfigError):
        with pytest.raises(kind) as caught:
            leaderboard(sources)
        return str(caught.value)

    assert "nothing to rank: name the output_file" in refusal()
    assert f"there is no {tmp_path / 'none.json'}" in refusal(tmp_path / "none.csv")
    assert f"{tmp_path} holds no results" in refusal(tmp_path)
    copied = shutil.copy(results / "a.json", tmp_path / "a.json")
    assert "copy it there too" in refusal(copied)
    content = json.loads(Path(copied).read_text())
    Path(copied).write_text(json.dumps(content | {"schema_version": 1}))
    assert "has schema version 1" in refusal(copied)
    content["results"] = [
        {**{k: v for k, v in row.items() if k != "statistics"}, "error": "broken"} for row in content["results"]
    ]
    Path(copied).write_text(json.dumps(content))
    assert "every row of it failed" in refusal(copied)
    shutil.copy(results / "a.scores.parquet", tmp_path)
    assert "no row of the results has figures" in refusal(copied, kind=DataError)
    os.remove(tmp_path / "a.scores.parquet")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "leaderboard.csv").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: cli.app(["leaderboard", str(results), "--output", str(tmp_path / "out")]))
    assert "was not written by this command" in capsys.readouterr().err
    empty = write_results(tmp_path / "empty", [frame_of("good", 1)])
    (tmp_path / "empty.scores.parquet").write_bytes(b"broken")
    assert "cannot be read as scored pairs" in refusal(empty, kind=DataError)
