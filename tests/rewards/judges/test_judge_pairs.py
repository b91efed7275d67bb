"""Judges that compare two samples of a group: tournaments, positions, replies."""

from __future__ import annotations

import base64
import io
import json
import math

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr

from tests.rewards.judges.judge_server import completion
from vlmrm.rewards.judges.pairwise import full_rounds, play, read_winner, strengths, win_rates

# Tournaments ---------------------------------------------------------------------------------------------------------


def judge_of(count: int, seed: int):
    """A judge of samples whose strengths differ by 2 (a standard deviation); it says the same again."""
    random = np.random.default_rng(seed)
    true = random.normal(0, 2, count)
    first_wins = random.random((count, count)) < 1 / (1 + np.exp(true[None, :] - true[:, None]))

    def compare(pairs):
        return {(i, j): (float(first_wins[i, j]) + 1 - float(first_wins[j, i])) / 2 for i, j in pairs}

    return compare


@pytest.mark.parametrize(("count", "budget"), [(16, 0.54), (64, 0.13)])
def test_eight_rounds_rank_like_all_pairs(count, budget):
    correlations = []
    for seed in range(20):
        compare = judge_of(count, seed)
        swiss = play(count, 8, compare)
        assert len(swiss) <= budget * count * (count - 1) / 2
        everything = compare([(i, j) for i in range(count) for j in range(i + 1, count)])
        correlations.append(spearmanr(strengths(count, swiss), strengths(count, everything))[0])
    assert np.mean(correlations) >= 0.95


@pytest.mark.parametrize("count", [2, 5])
def test_small_groups_meet_in_full_and_none_twice(count):
    asked = []

    def compare(pairs):
        asked.extend(pairs)
        return dict.fromkeys(pairs, 1.0)

    rates = win_rates(strengths(count, play(count, 4 * full_rounds(count), compare)))
    assert len(asked) == len(set(asked)) == count * (count - 1) / 2
    assert list(rates) == sorted(rates, reverse=True)  # the first of each pair is the earlier one


def test_nearly_everyone_meets_one_other_in_each_round():
    meetings = np.bincount(np.array(list(play(33, 8, judge_of(33, 0)))).reshape(-1), minlength=33)
    assert meetings.max() == 8 and meetings.min() >= 5 and meetings.mean() > 7


def test_strengths_are_those_of_the_bradley_terry_model():
    true = np.array([1.0, 0.0, -1.0])
    chances = {(i, j): 1 / (1 + math.exp(true[j] - true[i])) for i, j in ((0, 1), (0, 2), (1, 2))}
    fitted = strengths(3, chances)
    assert fitted[0] > fitted[1] > fitted[2] and fitted.sum() == pytest.approx(0, abs=1e-9)
    assert fitted == pytest.approx(true * fitted[0], abs=1e-6) and 0.6 < fitted[0] < 1.0  # the prior shrinks


# The reward ----------------------------------------------------------------------------------------------------------


def shades(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (20 * number,) * 3) for number in range(count)]


def brightness(body: dict) -> list[int]:
    urls = [part["image_url"]["url"] for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
    files = [io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls]
    return [Image.open(file).convert("L").getpixel((0, 0)) for file in files]


def brighter(body: dict, number: int):
    first, second = brightness(body)
    return completion(json.dumps({"justification": "so", "winner": f"Image {1 if first > second else 2}"}))


def test_the_reward_is_the_chance_to_win_pairs(server, judge):
    server.behave = brighter
    output = judge("pairwise_judge", vlm_model="m")(prompt=["a wall"] * 5, image=shades(5))
    assert sorted(output.rewards) == output.rewards and sum(output.rewards) == pytest.approx(2.5)
    assert len(server.bodies) == 2 * 10
    assert output.extra_info["pairs"] == [4] * 5


def test_rewards_do_not_depend_on_the_group_order(server, judge):
    server.behave = brighter
    pictures, order = shades(12), np.random.default_rng(0).permutation(12)
    asked = judge("pairwise_judge", vlm_model="m", rounds=4)

    given = asked(prompt=["a wall"] * 12, image=pictures).rewards
    shuffled = asked(prompt=["a wall"] * 12, image=[pictures[index] for index in order]).rewards

    assert shuffled == [given[index] for index in order]


def test_a_judge_that_prefers_a_place_says_nothing(server, judge):
    server.behave = lambda *_: completion('{"justification": "the first", "winner": "Image 1"}')
    output = judge("pairwise_judge", vlm_model="m")(prompt=["a wall"] * 4, image=shades(4))
    assert output.rewards == pytest.approx([0.5] * 4)


def test_a_published_pairwise_judge_needs_only_its_file(server, judge, tmp_path):
    server.behave = brighter
    url = "data:image/png;base64,"
    parts = [{"type": "image_url", "image_url": {"url": f"{url}{{{name}}}"}} for name in ("first", "second")]
    body = {"model": "published", "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    (tmp_path / "request.json").write_text(json.dumps({"body": body}))
    output = judge("pairwise_judge", request_file=str(tmp_path / "request.json"))(prompt=["a"] * 3, image=shades(3))
    assert sorted(output.rewards) == output.rewards and len(server.bodies) == 6
    assert {body["model"] for body in server.bodies} == {"published"}


def test_a_sample_that_cannot_be_compared_fails_alone(server, judge):
    def behave(body, number):
        return completion("Hm.") if 40 in brightness(body) else brighter(body, number)

    server.behave = behave
    output = judge("pairwise_judge", vlm_model="m")(prompt=["a wall"] * 4, image=shades(4))
    assert list(output.failures) == [2] and "names no winner; it begins 'Hm.'" in output.failures[2]
    assert math.isnan(output.rewards[2]) and output.rewards[0] < output.rewards[1] < output.rewards[3]
    alone = judge("pairwise_judge", vlm_model="m")(prompt=["a wall"], image=shades(1))
    assert "its group has no other sample" in alone.failures[0]


# Replies -------------------------------------------------------------------------------------------------------------

FLEX = {"categories": [{"name": "A", "dims": [{"score_1": 3, "score_2": 7}], "cat_winner": "Image 1"}], "reason": "so"}


@pytest.mark.parametrize(
    ("text", "credit"),
    [
        ("<think>Image 1: 9+8=17\nImage 2: 7+8=15</think>\n<answer>Image 1 is better</answer>", 1.0),
        (json.dumps({**FLEX, "winner": "Image 2"}), 0.0),
        ('```json\n{"cat_winner": "Image 2", "reason": "a "quoted" word", "winner": "Video 1"}', 1.0),
        ("<think>Image 1 is better at first sight</think><answer>Video 2 is better</answer>", 0.0),
        ("Alignment Score:\n Image 1: 0.4357\n Image 2: 0.5643\n\nStyle Score:\n Image 1: 0.7\n Image 2: 0.3", 1.0),
        ("Edited Image 1: 3.5, Edited Image 2: -1.25", 1.0),
        ("Looking closely, Image 2 is better, as its edit is whole.", 0.0),
        ('{"justification": "", "winner": "tie"}', 0.5),
        ('{"justification": "Image 1 is fine", "winner": "none"}', None),
        ("Both are nice pictures.", None),
    ],
)
def test_every_form_of_a_verdict_on_two(text, credit):
    assert read_winner(text) == credit
