"""Several data sets in one run: each scored as if alone, by models that are opened once, and chosen from together."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.runs import text_pairs, words
from vlmrm import cli
from vlmrm.data.arguments import DataArguments
from vlmrm.errors import BelowThreshold, ConfigError, DataError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.leaderboard import leaderboard
from vlmrm.evaluation.report import build_report
from vlmrm.evaluation.schema import load_results
from vlmrm.evaluation.scorers.reward import FunctionEntry
from vlmrm.evaluation.suite import evaluation_sets
from vlmrm.evaluation.sweep import sweep

SCORERS = """
from vlmrm.conversation import text_of
def length(talks):
    return [len(text_of(talk.messages)) for talk in talks]
def brevity(talks):
    return [-len(text_of(talk.messages)) for talk in talks]
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Rows whose chosen answer is the longer one in `long`, the shorter one in `short`, and scorers of length."""
    monkeypatch.chdir(tmp_path)
    Path("suite_scorers.py").write_text(SCORERS)
    text_pairs(tmp_path, 6).rename("short.jsonl")
    rows = [json.loads(line) | {"kind": "flipped"} for line in Path("short.jsonl").read_text().splitlines()]
    flipped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in flipped[:4]))
    return tmp_path


def run(*names: str, **keys):
    scorers = [f"python:suite_scorers.{name}" for name in names or ("length", "brevity")]
    return sweep(words(**{"scorer": scorers, "interventions": "none", "output_file": "out/all.csv", **keys}))


def test_each_set_has_results_of_its_own_sweep(here, monkeypatch):
    opened = []
    open_entry = FunctionEntry.open
    monkeypatch.setattr(FunctionEntry, "open", lambda self, run: opened.append(self.path) or open_entry(self, run))
    result = run(data=["short.jsonl", "other=long.jsonl"])
    assert len(opened) == 2, "each scorer is opened once for both sets"
    alone = run(dataset_path="long.jsonl", output_file="alone.csv")
    assert list(result.sets) == ["short", "other"]
    of_set = load_results("out/all/other.json")
    assert of_set["set_name"] == "other"
    assert of_set["settings"]["data"] == load_results("alone.json")["settings"]["data"]
    for row, lone in zip(result.sets["other"].rows, alone.rows, strict=True):
        assert json.dumps(row["statistics"]) == json.dumps(lone["statistics"])
    scores = [pd.read_parquet(it) for it in ("out/all/other.scores.parquet", "alone.scores.parquet")]
    pd.testing.assert_frame_equal(*scores)
    table = pd.read_csv("out/all.csv").set_index("checkpoint")
    assert table.loc["length", ["short", "other"]].tolist() == [0, 1]
    assert table.loc["brevity", ["short", "other"]].tolist() == [1, 0]
    assert table["mean preference_accuracy of 2 sets"].tolist() == [0.5, 0.5]
    assert [it.name for it in leaderboard(["out/all.csv"]).sets] == ["other", "short"]
    with pytest.raises(ConfigError, match=r"out/all\.csv is the table of 2 data sets"):
        build_report(["out/all.csv"], "report")


def test_the_best_is_by_mean_or_named_set(here):
    Path("half.jsonl").write_text("".join(Path("short.jsonl").read_text().splitlines(keepends=True)[:3]))
    sets = {"data": ["short.jsonl", "half.jsonl", "long.jsonl"]}
    result = run(**sets)
    assert result.choice["checkpoint"] == "brevity"
    assert result.choice["value"] == pytest.approx(2 / 3)
    assert result.choice["metric"] == "mean preference_accuracy of 3 sets"
    assert load_results("out/all/long.json")["best"] == result.choice, "its report is about the same checkpoint"
    assert "best by mean preference accuracy of 3 sets" in build_report(["out/all/long.csv"], "report").read_text()
    assert [line.model for line in leaderboard(["out/all"], best_only=True).lines] == ["python:suite_scorers.brevity"]
    named = run(**sets, metric_for_best="long:preference_accuracy", fail_under=1.0)
    assert (named.choice["checkpoint"], named.choice["metric"]) == ("length", "long:preference_accuracy")
    for name in ("long", "short"):  # the set that chose, and one that did not
        page = build_report([f"out/all/{name}.csv"], "report").read_text()
        assert "best by long:preference accuracy" in page
    with pytest.raises(BelowThreshold, match=r"has 0\.6667"):
        run(**sets, fail_under=0.9)
    wrong = (("lang:preference_accuracy", "mean long"), ("accuracy/plain", "on short"), ("hue_rank", "no evaluation"))
    for metric, said in wrong:
        with pytest.raises(ConfigError, match=said):
            run(**sets, metric_for_best=metric)


def test_an_unreadable_set_fails_by_name_alone(here, capsys):
    Path("broken.jsonl").write_text('{"prompt": "a"}\n')
    Path("suite.yaml").write_text("good: short.jsonl\nbad: {dataset_path: broken.jsonl}\ngone: absent.jsonl\n")
    line = words(scorer="python:suite_scorers.length", interventions="none", suite="suite.yaml", output_file="o.csv")
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: cli.app(["eval", *line]))
    output = capsys.readouterr()
    assert ended.value.code == DataError.exit_code
    assert "2 of 3 data sets" in output.err and "bad: " in output.err and "gone: absent.jsonl" in output.err
    assert list(pd.read_csv("o.csv").columns[2:4]) == ["good:preference_accuracy", "good"]
    with pytest.raises(DataError, match="gone, by which metric_for_best chooses"):
        run(data=["short.jsonl", "gone=absent.jsonl"], metric_for_best="gone:loss")
    Path("suite.yaml").write_text("good: short.jsonl\nbad: long.jsonl\n")
    mended = run("length", suite="suite.yaml", output_file="o.csv")
    assert not mended.unread and mended.rows[0]["error"] is None


def sets_of(data_keys=None, **keys):
    args = EvaluationArguments(**{"scorer": ["x"], "output_file": "out/all.csv", **keys})
    return evaluation_sets(args, DataArguments(**(data_keys or {})))


def test_a_suite_file_gives_sets_their_own_keys(here):
    Path("suite.yaml").write_text(
        """
plain: long.jsonl
mine: {dataset_path: [short.jsonl, long.jsonl], group_by: kind, max_eval_samples: 3, columns: {prompt: prompt}}
vl-rewardbench:
edits: {benchmark: genai-bench-edit, dataset_path: copies/edits}
"""
    )
    (here / "copies" / "vl-rewardbench").mkdir(parents=True)
    reading = {"dataset_path": "copies", "max_eval_samples": 9, "dataset_split": "test"}
    plain, mine, public, edits = sets_of(reading, suite="suite.yaml", group_by=["a"])
    assert (plain.name, plain.data_args.dataset_path, plain.group_by) == ("plain", ["long.jsonl"], ("a",))
    assert plain.data_args.dataset_split == "test" and plain.csv == Path("out/all/plain.csv")
    assert (mine.data_args.max_eval_samples, plain.data_args.max_eval_samples) == (3, 9)
    assert mine.group_by == ("a", "kind") and mine.data_args.column_names == {"prompt": "prompt"}
    assert public.benchmark.name == "vl-rewardbench"
    assert public.data_args.dataset_path == ["copies/vl-rewardbench"]
    assert public.data_args.dataset_split == "train", "a key of data sets does not reach a benchmark"
    assert edits.benchmark.name == "genai-bench-edit" and edits.data_args.dataset_path == ["copies/edits"]
    both = sets_of(benchmark=["hpdv3", "vl-rewardbench"], data=["a=b=c.jsonl", "some/hub-id"])
    assert [it.name for it in both] == ["hpdv3", "vl-rewardbench", "a", "hub-id"]
    assert both[2].data_args.dataset_path == ["b=c.jsonl"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("mine: {dataset_pth: a.jsonl}", "suite.yaml: mine: .*did you mean dataset_path"),
        ("mine: {max_pixels: 9}", "suite.yaml: mine: max_pixels"),
        ("mine: {group_by: [a]}", "suite.yaml: mine has neither dataset_path nor benchmark"),
        ("mine: {dataset_path: a, eval_fraction: 2}", "mine: eval_fraction is 2.0"),
        ("hpdv9:", "did you mean hpdv"),
        ("hpdv3: {benchmark: hpdv3, images: none}", "images does not go with benchmark"),
        ("a/b: c.jsonl", "a/b cannot be"),
        ("mine: [a.jsonl]", "mine must be a path"),
        ("{}", "names no set"),
    ],
)
def test_a_typo_in_a_suite_is_named(here, content, reason):
    Path("suite.yaml").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        sets_of(suite="suite.yaml")


@pytest.mark.parametrize(
    ("data_keys", "keys", "reason"),
    [
        ({}, {"suite": "vidoe"}, "did you mean video"),
        ({}, {"suite": "all.yml"}, "name a YAML file"),
        ({}, {"data": ["short.jsonl", "old/short.jsonl"]}, "two sets are called short"),
        ({"dataset_path": "x.jsonl"}, {"data": ["short.jsonl", "long.jsonl"]}, "--data NAME=PATH"),
        ({"dataset_path": "x.jsonl"}, {"suite": "video"}, "no folder"),
        ({"dataset_split": "test"}, {"suite": "video"}, "dataset_split does not go with benchmark"),
        ({}, {}, "dataset_path is missing"),
    ],
)
def test_sets_that_do_not_go_together_are_refused(here, data_keys, keys, reason):
    with pytest.raises(ConfigError, match=reason):
        sets_of(data_keys, **keys)
