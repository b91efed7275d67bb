"""The leaderboard: models by sets, merged where the data are the same, and nothing is put together silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.browser import CHROMIUM, Browser
from tests.pair_frames import pair_frame
from vlmrm import cli
from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.leaderboard import build_leaderboard, leaderboard, page
from vlmrm.evaluation.schema import SCHEMA_VERSION, dump_results
from vlmrm.measures.analysis import Finding
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.pairs import credits_of

MODELS = {"good": 0.9, "fair": 0.75, "poor": 0.55}
PROVENANCE = {"git_commit": None, "versions": {}, "device": "cpu", "dtype": "float32", "attention": ""}
PROVENANCE |= {"chat_template_sha256": "", "processes": 1, "checkpoint": {}}


def margins_of(model: str, seed: int, count: int) -> np.ndarray:
    return np.where(np.random.default_rng([seed, len(model), ord(model[0])]).random(count) < MODELS[model], 1.0, -1.0)


def frame_of(model: str, data: int, count: int = 200, **columns) -> pd.DataFrame:
    """Pairs of a data set, the same of every model but for the scores."""
    names = [f"{data}-{i}" for i in range(count)]
    texts = {"prompt_text": names, "chosen_text": "yes", "rejected_text": [f"no {i}" for i in range(count)]}
    made = pair_frame(margins_of(model, data, count), model=f"runs/{model}", comparison_id=names, **texts)
    return made.assign(cluster=[f"{data}/{i // 2}" for i in range(count)]).assign(**columns)


def write_results(path: Path, frames, *, data="1", benchmark=None, date="2026-11-21T03:00:00Z", **changed) -> Path:
    """Write what a sweep would of these scored pairs."""
    rows = []
    for frame in frames:
        model, checkpoint = frame["model"].iloc[0], frame["checkpoint"].iloc[0]
        accuracy = float(np.nanmean(credits_of(frame["chosen_score"].to_numpy(float))))
        figure = {"value": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "standard_error": 0.02}
        figure |= {"n": len(frame), "clusters": 100}
        overall = {"preference_accuracy": figure, "sample_count": len(frame)}
        provenance = PROVENANCE | {"date": date, "data": data, "weights": f"weights of {model}"}
        row = {"model": model, "checkpoint": checkpoint, "path": f"{model}/{checkpoint}", "error": None, "seconds": 1}
        row |= {"statistics": {"overall": overall, "category": {}, "by": {}}, "provenance": provenance}
        rows.append(row | ({"benchmark": {"overall": figure, "macro": figure | {"value": 0.5}}} if benchmark else {}))
    reading = {"dataset_path": [changed.pop("source", "tests/it.jsonl")]}
    settings = {"data": data, "benchmark": benchmark, "reading": reading}
    content = {"schema_version": SCHEMA_VERSION, "settings": settings, "leakage": None, "best": None, "results": rows}
    content |= changed
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


def test_cells_are_result_figures_and_gaps_stay_missing(results, tmp_path):
    build_leaderboard([results], tmp_path)
    table = pd.read_csv(tmp_path / "leaderboard.csv").set_index("model")
    for model in MODELS:
        accuracy = (margins_of(model, 1, 200) > 0).mean()
        line = table.loc[f"runs/{model}/checkpoint-1"]
        assert line["it"] == pytest.approx(accuracy)
        assert (line["it/low"], line["it/pairs"]) == (pytest.approx(accuracy - 0.05), 200)
    poor, fair = table.loc["runs/poor/checkpoint-1"], table.loc["runs/fair/checkpoint-1"]
    assert poor["vl-rewardbench"] == pytest.approx((margins_of("poor", 2, 200) > 0).mean())
    assert poor["mean"] == pytest.approx((poor["it"] + poor["vl-rewardbench"]) / 2)
    assert poor["mean/high"] - poor["mean"] == pytest.approx(0.05 / np.sqrt(2))
    assert np.isnan([fair["vl-rewardbench"], fair["mean"], fair["best_rank"]]).all()


def test_ranks_are_those_that_the_data_leave_open(tmp_path):
    frames = [frame_of(model, 1) for model in MODELS]
    twin = frame_of("good", 1).assign(model="runs/twin")
    path = write_results(tmp_path / "a", [*frames, twin])
    lines = {line.model.split("/")[1]: line for line in leaderboard([path]).lines}
    assert [lines[name].ranks for name in ("good", "twin", "fair", "poor")] == [(1, 2), (1, 2), (3, 3), (4, 4)]


def test_a_blind_model_carries_its_mark(tmp_path):
    path = write_results(tmp_path / "a", [frame_of(model, 1) for model in MODELS])
    results = json.loads(path.with_suffix(".json").read_text())
    none = dict.fromkeys(Estimate._fields, 0.0) | {"n": 200, "clusters": 100}
    blind = Finding("swapped_image", "image", "not reliant", none, none, 0.05, 0.01, 0.1, "", 1)
    for row, state in zip(results["results"], ("not reliant", "reliant", "undecided"), strict=True):
        row["statistics"]["audit"] = [blind._replace(state=state)._asdict()]
    path.with_suffix(".json").write_text(json.dumps(results))
    board = leaderboard([path])
    assert [line.model.split("/")[1] for line in board.lines if line.blind] == ["good"]
    assert page(board, "x").count("does not look at the image") == 1


def test_results_of_several_machines_are_one_column(tmp_path):
    first = write_results(tmp_path / "a", [frame_of("good", 1)])
    second = write_results(tmp_path / "b", [frame_of("poor", 1)], source="elsewhere/copy.jsonl")
    board = leaderboard([first, second])
    assert [it.name for it in board.sets] == ["it"] and len(board.lines) == 2 and board.notes == []


def test_other_data_of_equal_name_get_another_column(tmp_path):
    whole = write_results(tmp_path / "a", [frame_of("good", 1)])
    sample = write_results(tmp_path / "b", [frame_of("poor", 1)[:50]], data="of the sample")
    board = leaderboard([whole, sample])
    assert [it.name for it in board.sets] == ["it", "it (2)"]
    assert "b.json is of other data than the other results of it" in board.notes[0]
    assert "No two models were measured on every set" in page(board, "x")


def test_the_newest_of_two_figures_counts_with_notice(tmp_path):
    old = write_results(tmp_path / "old", [frame_of("good", 1), frame_of("poor", 1)])
    again = frame_of("good", 1).assign(chosen_score=-1.0)
    new = write_results(tmp_path / "new", [again], date="2026-11-22T03:00:00Z")
    for order in ([old, new], [new, old]):
        board = leaderboard(order)
        [found] = [line.figures for line in board.lines if "good" in line.model]
        assert found[0].value == 0.0
        assert "the figures of 2026-11-22T03:00:00Z are taken" in board.notes[0]


def test_the_best_of_each_evaluation_may_stand_alone(tmp_path):
    best = {"metric": "preference_accuracy", "value": 1.0, "model": "runs/fair"}
    best |= {"checkpoint": "checkpoint-1", "path": "runs/fair/checkpoint-1", "without_luck": None}
    path = write_results(tmp_path / "a", [frame_of(model, 1) for model in MODELS], best=best)
    assert [line.model for line in leaderboard([path], best_only=True).lines] == ["runs/fair/checkpoint-1"]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_readers_sort_it(results, tmp_path):
    """Two clicks on the last set: the lowest first, and those without a figure last."""
    page = build_leaderboard([results], tmp_path / "out")
    names = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[0].dataset.value.split('/')[1])"
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        assert browser.evaluate(names) == ["good", "poor", "fair"]
        for _ in range(2):
            browser.click("thead th:last-child button")
        assert browser.evaluate(names) == ["poor", "good", "fair"]
        assert browser.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
        assert browser.complaints == []


def test_results_that_cannot_be_merged_are_refused(results, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    copied = shutil.copy(results / "a.json", tmp_path / "a.json")
    for sources, error, said in (
        ([], ConfigError, "output_file"),
        ([tmp_path / "none.csv"], ConfigError, "none.json cannot be read"),
        ([tmp_path / "empty"], ConfigError, "empty holds no results"),
        ([copied], DataError, "a.scores.parquet cannot be read"),
    ):
        with pytest.raises(error, match=said):
            leaderboard(sources)
    (tmp_path / "leaderboard.csv").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: cli.app(["leaderboard", str(results), "--output", str(tmp_path)]))
    assert "was not written by this command" in capsys.readouterr().err
