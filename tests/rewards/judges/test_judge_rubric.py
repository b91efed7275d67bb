"""Judges by a rubric of one's own: the file and its errors, what the server is asked, and how replies are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rewards.judges.judge_server import completion
from vlmrm.errors import ConfigError
from vlmrm.rewards.judges.rubric import load_rubric

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/rubric.yaml"
RUBRIC = """question: How good is the poster for {prompt}?
scale: [1, 5]
aggregation: mean
aspects:
  - name: content
    description: Does it show it?
  - name: flaws
    description: Is it clean?
    scale: [0, 10]
"""


@pytest.fixture
def rubric(judge, tmp_path):
    """Makes a judge by the text of a rubric's file."""

    def make(text: str = RUBRIC):
        path = tmp_path / "rubric.yaml"
        path.write_text(text)
        return judge("rubric", vlm_model="m", rubric=str(path))

    return make


def scores(content, flaws) -> str:
    return json.dumps(
        {"content": {"justification": "{so}", "score": content}, "flaws": {"justification": "", "score": flaws}}
    )


def weighted(first: float, second: float) -> str:
    text = RUBRIC.replace("mean", "weighted").replace("show it?\n", f"show it?\n    weight: {first}\n")
    return text + f"    weight: {second}\n"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (RUBRIC, (0.75 + 0.3) / 2),
        (RUBRIC.replace("mean", "min"), 0.3),
        (RUBRIC.replace("mean", "product"), 0.75 * 0.3),
        (weighted(3, 1), (3 * 0.75 + 0.3) / 4),
    ],
)
def test_aspect_scores_are_scaled_and_combined(server, rubric, picture, text, reward):
    server.behave = lambda *_: completion(scores(4, 3))
    output = rubric(text)(prompt=["a fair"], image=[picture])
    assert output.rewards == [pytest.approx(reward)]
    assert output.extra_info["aspects"] == [{"content": 4.0, "flaws": 3.0}]


@pytest.mark.parametrize(
    "reply",
    [
        scores(4, 3),
        f"Here it is:\n```json\n{scores(4, 3)}\n```\nAnything else?",
        f"<think>{scores(1, 1)}</think>{scores(4, 3)}",
        f"A draft: {scores(1, 1)} but finally {scores(4, 3)}",
        '{"Content": 4, "Flaws": "3"}',
        "{not json} {broken\n- **Content**: 4/5\n- **Flaws:** 3",
    ],
)
def test_every_form_of_a_reply(server, rubric, picture, reply):
    server.behave = lambda *_: completion(reply)
    assert rubric()(prompt=["a fair"], image=[picture]).extra_info["aspects"] == [{"content": 4.0, "flaws": 3.0}]


def test_what_does_not_apply_stands_back(server, rubric, picture):
    server.behave = lambda *_: completion(scores(4, "N/A"))
    assert rubric()(prompt=["a fair"], image=[picture]).rewards == [0.75]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("It is a fine poster.", "no score for content"),
        ('{"content": {"score": 4}}', "no score for flaws"),
        (scores(True, 3), "no score for content"),
        (scores(6, 3), "not from 1 to 5"),
        (scores("N/A", "N/A"), "N/A for every aspect"),
    ],
)
def test_a_reply_ignoring_the_rubric_is_a_failure(server, rubric, picture, reply, said):
    server.behave = lambda *_: completion(reply)
    output = rubric()(prompt=["a fair"], image=[picture])
    assert said in output.failures[0] and output.extra_info["reply"] == [reply]


def test_questions_have_scales_and_a_fenced_prompt(server, rubric, picture):
    server.behave = lambda *_: completion("content: 4\nflaws: 3")
    assert rubric()(prompt=["{prompt} a fair"], image=[picture]).rewards == [pytest.approx(0.525)]
    assert "from 1 (worst) to 5 (best): Does it show it?" in server.texts[0]
    assert ">\n{prompt} a fair\n</data-" in server.texts[0]


def test_the_example_is_a_rubric():
    assert load_rubric(EXAMPLE).aspects


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("scale: [1, 5]", "scales: [1, 5]", "did you mean scale"),
        ("scale: [1, 5]", "scale: [5, 1]", "scale: the worst"),
        ("{prompt}", "{promt}", "question: there is no {promt}"),
        ("name: flaws", "name: content", "another aspect content"),
        ("name: flaws", "nmae: flaws", "aspects.1.nmae (did you mean name"),
        ("    scale: [0, 10]", "    weight: 2", "flaws has a weight, and aggregation is mean"),
        ("question: How good is the poster for {prompt}?\n", "", "question is missing"),
    ],
)
def test_errors_in_the_file_are_told(tmp_path, old, new, said):
    path = tmp_path / "rubric.yaml"
    path.write_text(RUBRIC.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        load_rubric(path)
    assert said in str(refused.value)
