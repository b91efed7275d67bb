"""EditScore's two questions, the forms of its replies, and the score of several passes."""

from __future__ import annotations

import math
import threading
import time

import pytest
import yaml
from judge_server import completion
from PIL import Image

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.edit_score import read_scores
from vlmrm.rewards.registry import reward_model_class

SOURCE = Image.new("RGB", (8, 8), "white")


@pytest.fixture
def edit_score(server):
    def make(**settings):
        extra = {"api_base_url": server.url, "malformed_retries": 0, **settings}
        return reward_model_class("edit_score")(RewardArguments("it", device="cpu", extra_kwargs=extra), None)

    return make


def pictures_in(body: dict) -> int:
    return sum(part["type"] == "image_url" for message in body["messages"][-1:] for part in message["content"])


def answering(following: list[str], quality: list[str]):
    """Each question's replies in turn; the first question shows two pictures, the second one."""
    left = {2: list(following), 1: list(quality)}
    return lambda body, number: completion(left[pictures_in(body)].pop(0))


def test_the_score_is_the_root_of_the_smaller_scores_and_the_mean_over_passes(server, edit_score, picture):
    server.behave = answering(
        ['{"reasoning": "", "score": [20, 15]}', '{"reasoning": "", "score": [5, 25]}'],
        ['{"reasoning": "", "score": [25, 10]}', '{"reasoning": "", "score": [24.5, 20]}'],
    )
    output = edit_score(replies=2, max_concurrent=1)(["make it red"], [picture], [[SOURCE]])
    passes = [math.sqrt(6.0 * 4.0), math.sqrt(2.0 * 8.0)]
    assert output.rewards == pytest.approx([sum(passes) / 2], abs=1e-12) and not output.failures
    assert output.extra_info["passes"] == [pytest.approx(passes)]
    assert output.extra_info["following_scores"] == [[[20.0, 15.0], [5.0, 25.0]]]
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
        ('{"score": [20]}', r"no \"score\": \[score1, score2\]"),
        ('{"score": [20, 15, 3]}', r"no \"score\""),
        ("a good edit, [20, 15] I think", r"no \"score\""),
        ('{"score": [26, 15]}', "has the score 26, which is not from 0 to 25"),
        ('{"score": [-1, 15]}', "has the score -1"),
    ],
)
def test_what_has_no_two_scores_is_a_failure_and_no_guess(server, edit_score, picture, text, said):
    with pytest.raises(RewardError, match=said):
        read_scores(text)
    good = '{"score": [20, 15]}'
    server.behave = answering([good, text], [good, good])
    output = edit_score(max_concurrent=1)(["a", "b"], [picture] * 2, [[SOURCE]] * 2)
    assert list(output.failures) == [1] and "it begins" in output.failures[1] and math.isnan(output.rewards[1])
    assert output.rewards[0] == pytest.approx(6.0)


def test_an_edit_needs_one_source(server, edit_score, picture):
    server.behave = lambda *_: completion('{"score": [20, 15]}')
    output = edit_score()(["a", "b"], [picture] * 2, [[SOURCE], [SOURCE] * 2])
    assert list(output.failures) == [1] and "has 2 condition images" in output.failures[1]


def test_both_questions_are_sent_as_their_files_say(server, edit_score, picture, tmp_path):
    files = {}
    for name, shown in (("sc", ["{source}", "{image}"]), ("pq", ["{image}"])):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
        text = {"type": "text", "text": 'Do "{prompt}": {"score": []}' if name == "sc" else "Rate it."}
        messages = [{"role": "user", "content": [text, *parts]}]
        files[name] = str(tmp_path / f"{name}.yaml")
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"body": {"model": "published", "messages": messages}}))
    server.behave = answering(['{"score": [20, 15]}'], ['{"score": [25, 10]}'])
    judge = edit_score(request_file=files["sc"], quality_request_file=files["pq"])
    assert judge(["red"], [picture], [[SOURCE]]).rewards == [pytest.approx(math.sqrt(24.0))]
    asked = {pictures_in(body): body["messages"] for body in server.bodies}
    assert [asked[count][0]["content"][0]["text"] for count in (2, 1)] == ['Do "red": {"score": []}', "Rate it."]
    assert judge.counters()["calls"] == 2
    with pytest.raises(ConfigError, match="give both or neither"):
        edit_score(request_file=files["sc"])


def test_both_questions_are_within_one_limit_of_calls(server, edit_score, picture):
    served = threading.Semaphore(2)

    def one_of_two(*_):
        assert served.acquire(blocking=False)
        time.sleep(0.02)
        served.release()
        return completion('{"score": [20, 15]}')

    server.behave = one_of_two
    assert not edit_score(max_concurrent=2, max_retries=0)(["red"] * 8, [picture] * 8, [[SOURCE]] * 8).failures
