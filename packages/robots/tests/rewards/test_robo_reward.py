"""RoboReward's ratings: which replies give which reward, and what the judge is shown of a trajectory."""

from __future__ import annotations

import math

import pytest
from PIL import Image

from tests.rewards.judges.judge_server import completion
from vlmrm.rewards import RewardArguments
from vlmrm_robots.trajectories.reward_models import RewardOfPrefixes


@pytest.fixture
def frames():
    return [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(0, 240, 10)]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("ANSWER: 4", 4.0),
        ("The cup is in the bowl.\n**ANSWER:** <5>", 5.0),
        ("answer: 2/5", 2.0),
        ("<think>ANSWER: 1</think>ANSWER: 3", 3.0),
        ("ANSWER: 2\nThe rubric says ANSWER: 1 for less.", 2.0),
    ],
)
def test_the_first_answer_is_the_reward(server, judge, frames, text, reward):
    server.behave = lambda *_: completion(text)
    assert judge("robo_reward")(prompt=["Fill the bowl."], video=[frames]).rewards == [reward]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "the reply has no ANSWER; it begins '4'"),
        ("ANSWER: 6", "its ANSWER is '6', which is no number from 1 to 5"),
        ("ANSWER: 0", "no number from 1 to 5"),
        ("ANSWER: high", "its ANSWER is 'high'"),
        ("ANSWER: 4/10", "its ANSWER is '4/10'"),
    ],
)
def test_a_reply_without_a_rating_is_a_failure(server, judge, frames, text, said):
    server.behave = lambda *_: completion(text)
    assert said in judge("robo_reward")(prompt=["Fill the bowl."], video=[frames]).failures[0]


def test_the_judge_sees_the_task_and_spread_frames(server, judge, frames):
    server.behave = lambda *_: completion("ANSWER: 3")
    turn = {"role": "assistant", "content": [{"type": "image", "image": frame} for frame in frames]}
    made = judge("robo_reward", max_frames=4)
    assert made(prompt=["Fill the bowl."] * 2, response=[[turn], "It is full."]).rewards[0] == 3.0
    [body] = server.bodies
    parts = body["messages"][1]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * 4 + ["text"]
    assert "Fill the bowl." in parts[-1]["text"] and "ANSWER: <score>" in parts[-1]["text"]
    output = made(prompt=["Fill the bowl."] * 2, response=[[turn], "It is full."])
    assert math.isnan(output.rewards[1]) and "no list of images" in output.failures[1]
    assert output.extra_info["reply"] == ["ANSWER: 3", None]


def test_a_rating_after_every_frame_counts_frames_shown(server, frames):
    def rated(body, number):
        return completion(f"ANSWER: {min(5, len(body['messages'][1]['content']) - 1)}")

    server.behave = rated
    settings = {"api_base_url": server.url}
    reward = RewardOfPrefixes(RewardArguments("robo", "robo_reward", device="cpu", extra_kwargs=settings))
    assert reward.score_prefixes("Fill the bowl.", frames[:6]) == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
