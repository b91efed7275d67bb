"""EditScore's two questions, the forms of its replies, and the score of several passes."""

from __future__ import annotations

import math
from functools import partial

import pytest
from PIL import Image

from tests.rewards.judges.judge_server import completion
from vlmrm.errors import RewardError
from vlmrm.rewards.judges.pointwise import read_scores

SOURCE = Image.new("RGB", (8, 8), "white")


@pytest.fixture
def edit_score(judge):
    return partial(judge, "edit_score")


def pictures_in(body: dict) -> int:
    return sum(part["type"] == "image_url" for message in body["messages"][-1:] for part in message["content"])


def answering(following: list[str], quality: list[str]):
    """Each question's replies in turn; the first question shows two pictures, the second one."""
    left = {2: list(following), 1: list(quality)}
    return lambda body, number: completion(left[pictures_in(body)].pop(0))


def test_the_score_averages_roots_of_minima_over_passes(server, edit_score, picture):
    server.behave = answering(
        ['{"reasoning": "", "score": [20, 15]}', '{"reasoning": "", "score": [5, 25]}'],
        ['{"reasoning": "", "score": [25, 10]}', '{"reasoning": "", "score": [24.5, 20]}'],
    )
    output = edit_score(replies=2, max_concurrent=1)(["make it red"], [picture], condition_images=[[SOURCE]])
    passes = [math.sqrt(6.0 * 4.0), math.sqrt(2.0 * 8.0)]
    assert output.rewards == pytest.approx([sum(passes) / 2], abs=1e-12) and not output.failures
    assert output.extra_info["rewards"] == [pytest.approx(passes)]
    assert output.extra_info["scores"] == [[[[20.0, 15.0], [25.0, 10.0]], [[5.0, 25.0], [24.5, 20.0]]]]
    assert sum("make it red" in text for text in server.texts) == 2  # the instruction is in the first question alone


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('{\n"reasoning" : "fine",\n"score" : [20, 15]\n}', [20.0, 15.0]),
        ('```json\n{"reasoning": "fine", "score": [20.5, 15]}\n```', [20.5, 15.0]),
        ('{"reasoning": "the sign "OPEN" [1, 2] is gone", "score": [3, 0]}', [3.0, 0.0]),
        ("{'reasoning': 'fine', 'score': [3, 4,]}", [3.0, 4.0]),
        ("{“reasoning”: “fine”, “score”: [3, 4]}", [3.0, 4.0]),
        ("[18, 22]", [18.0, 22.0]),
        ('<think>"score": [1, 1]</think>{"score": [20, 15]}', [20.0, 15.0]),
    ],
)
def test_replies_are_read_as_the_authors_read_them(text, scores):
    assert read_scores(text) == scores


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"score": [20]}', r"no \"score\""),
        ("a good edit, [20, 15] I think", r"no \"score\""),
        ('{"score": [26, 15]}', "score 26, .* not from 0 to 25"),
    ],
)
def test_a_reply_without_two_scores_fails_without_guessing(server, edit_score, picture, text, said):
    with pytest.raises(RewardError, match=said):
        read_scores(text)
    good = '{"score": [20, 15]}'
    server.behave = answering([good, text], [good, good])
    output = edit_score(max_concurrent=1)(["a", "b"], [picture] * 2, condition_images=[[SOURCE]] * 2)
    assert list(output.failures) == [1] and "it begins" in output.failures[1] and math.isnan(output.rewards[1])
    assert output.rewards[0] == pytest.approx(6.0)


def test_an_edit_needs_one_source(server, edit_score, picture):
    server.behave = lambda *_: completion('{"score": [20, 15]}')
    output = edit_score()(["a", "b"], [picture] * 2, condition_images=[[SOURCE], [SOURCE] * 2])
    assert list(output.failures) == [1] and "has 2 condition images" in output.failures[1]
