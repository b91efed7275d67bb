"""`vlmrm distil`: what scorers say, with where they disagree, as data to train on; nothing is asked twice."""

import json
from pathlib import Path

import pytest

from tests.evaluation.test_scorers import answers_of
from tests.rewards.judges.judge_server import JudgeServer, completion
from vlmrm import cli
from vlmrm.conversation import Judgement
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons

SCORERS = """
def length(conversations):
    return [float(len(it.answer.text)) if it.answer.text != "broken" else float("nan") for it in conversations]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("distil_scorers.py").write_text(SCORERS)
    rows = [{"prompt": "Say", "responses": answers} for answers in (["a", "bbb"], ["cc", "d"], ["a", "bbb"])]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_but_of_d(body: dict, number: int):
    return completion(json.dumps({"winner": "Answer 2" if answers_of(body)[0] == "d" else "Answer 1"}))


def run(*scorers: str, data: str = "answers.jsonl", status: int = 0, **reading) -> list[tuple[Judgement, ...]]:
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: cli.app(["distil", "--from", *scorers, "--data", data, "--output", "judged.jsonl"]))
    assert ended.value.code in (None, status)
    rows = load_comparisons(["judged.jsonl"], arguments=DataArguments(**reading))
    return [row["comparison"].judgements for row in rows]


def test_scorers_judge_as_raters_and_are_asked_once(here):
    with JudgeServer().running() as server:
        server.behave = first_but_of_d
        judge = f"judge:m@{server.url}"
        rows = run(judge, "python:distil_scorers.length")
        assert len(server.bodies) == 4, "two rows that differ, each in both orders"
        of_length = Judgement((0, 1), (1.0, 3.0), "rating", weight=0.5, rater="python:distil_scorers.length")
        either = [Judgement((0, 1), values, weight=0.25, rater=judge) for values in ((1, 0), (0, 1))]
        assert rows[0] == (*either, of_length) and len(rows) == 2
        doubts = [json.loads(line)["disagreement"] for line in Path("judged.jsonl").read_text().splitlines()]
        assert doubts == [0.3333, 0.0]
        with open("judged.jsonl.answers", "a") as file:
            file.write('\n{"scorer": "cut o')
        with open("answers.jsonl", "a") as file:
            file.write(json.dumps({"prompt": "Say", "responses": ["e", "ff"]}))
        assert len(run(judge, "python:distil_scorers.length")) == 3 and len(server.bodies) == 6


def test_a_rater_alone_is_kept_by_name(here):
    [[rating], _] = run("python:distil_scorers.length")
    assert rating == Judgement((0, 1), (1.0, 3.0), "rating", rater="python:distil_scorers.length")


def test_what_has_no_answer_is_left_out_and_said(here, capsys):
    Path("more.jsonl").write_text(
        '{"prompt": "Say", "responses": ["broken", "a"]}\n{"prompt": "So", "response": "b"}\n'
    )
    outputs = {"length": "rating 0-10"}
    [[rating]] = run("python:distil_scorers.length", data="more.jsonl", status=3, outputs=outputs)
    assert (rating.values, rating.kind) == ((1.0,), "rating")
    assert "1 answer missing" in capsys.readouterr().err
