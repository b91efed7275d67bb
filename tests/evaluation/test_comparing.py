"""Paired tests against Student's and against every flip of signs, and how often they are wrong by mistake."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tests.pair_frames import pair_frame
from vlmrm.errors import DataError
from vlmrm.measures import differences
from vlmrm.measures.differences import chance_of_largest, compare

RNG = np.random.default_rng(0)
MERIT = RNG.normal(0.8, 1, 300)
PROMPTS = [f"p{i // 3}" for i in range(300)]


def checkpoint(noise: float):
    return pair_frame(MERIT + RNG.normal(0, noise, 300), cluster=PROMPTS)


def test_chance_is_that_of_every_exchange_within_prompts():
    """Three checkpoints turned in six prompts, in 729 ways; each difference by the root of its squares."""
    sums = RNG.integers(0, 4, (6, 3)).astype(float)
    every = []
    for turns in product(range(3), repeat=6):
        turned = np.stack([np.roll(row, -turn) for row, turn in zip(sums, turns, strict=True)])
        apart = [turned[:, i] - turned[:, j] for i, j in combinations(range(3), 2)]
        every.append(max(abs(it.sum()) / math.sqrt((it**2).sum() + 18) for it in apart))
    drawn = chance_of_largest(sums, 18.0)
    quantiles = [0.25, 0.5, 0.75, 0.95]
    assert np.quantile(drawn, quantiles) == pytest.approx(np.quantile(every, quantiles), rel=0.05)
    assert set(drawn.round(6)) <= set(np.round(every, 6))


def test_difference_is_over_pairs_with_prompts_drawn_together():
    first, second = checkpoint(0.1), checkpoint(2.0)
    [test] = compare({"a": first, "b": second})
    right = [(frame["chosen_score"] > 0).to_numpy(float) for frame in (first, second)]
    assert (test.first, test.second, test.pairs) == ("a", "b", 300)
    assert (test.first_accuracy, test.second_accuracy) == pytest.approx((right[0].mean(), right[1].mean()))
    assert (test.only_first, test.only_second) == ((right[0] > right[1]).sum(), (right[1] > right[0]).sum())
    t = ttest_1samp((right[0] - right[1]).reshape(100, 3).mean(axis=1), 0)
    low, high = t.confidence_interval()
    assert test.difference.value == pytest.approx((right[0] - right[1]).mean())
    # Drawn flips, and one more gain and loss, are all that differs.
    assert (test.difference.low, test.difference.high) == pytest.approx((low, high), abs=0.01)
    assert test.difference.low > 0 and test.p_value < 0.001


def test_all_pairs_of_several_are_compared_jointly():
    frames = {name: checkpoint(noise) for name, noise in (("a", 0.1), ("b", 1.0), ("c", 3.0))}
    tests = compare(frames)
    assert [(test.first, test.second) for test in tests] == [("a", "b"), ("a", "c"), ("b", "c")]
    [alone] = compare({"a": frames["a"], "b": frames["b"]})
    assert alone.difference.value == tests[0].difference.value
    assert alone.p_value <= tests[0].p_value
    assert tests[0].difference.low < alone.difference.low and alone.difference.high < tests[0].difference.high
    for test in tests:
        assert (test.p_value < 0.05) == (not test.difference.low <= 0 <= test.difference.high)


@pytest.mark.parametrize(("prompts", "lists"), [(50, 5), (30, 30), (60, 0)])
def test_equal_checkpoints_seldom_differ_at_all(prompts: int, lists: int, monkeypatch):
    """Some prompts are lists of nine: their 36 pairs took a test of unequal errors to 47 % of false reports."""
    monkeypatch.setattr(differences, "DRAWS", 300)
    rng, wrong = np.random.default_rng(1), 0
    sizes = np.where(np.arange(prompts) < lists, 36, 1)
    units, added = np.repeat(np.arange(prompts), sizes), differences.added_square(sizes)
    for _ in range(100):
        shared = rng.normal(0.6, 0.7, (prompts, 1))[units] + rng.normal(0, 0.45, (len(units), 1))
        right = shared + rng.normal(0, 0.7, (len(units), 8)) > 0
        sums = np.stack([np.bincount(units, of) for of in right.T], axis=1)
        wrong += differences.statistics_of(sums, added).max() > np.quantile(chance_of_largest(sums, added), 0.95)
    assert wrong <= 11  # 5 on average


def test_pairs_are_matched_by_identity_not_by_place():
    frame = checkpoint(1.0)
    shuffled = frame.sample(frac=1, random_state=0).iloc[:200]
    [test] = compare({"a": frame, "b": shuffled})
    assert test.pairs == 200 and test.difference.value == 0


def test_repeated_comparisons_count_as_often_as_they_come():
    frame = pair_frame([1.0, -1.0, -1.0], comparison_id=["x", "y", "y"], cluster=["p", "q", "q"])
    [test] = compare({"a": frame, "b": frame.assign(chosen_score=1.0)})
    assert (test.pairs, test.only_first, test.only_second) == (3, 0, 2)


def test_ties_of_people_are_left_out():
    frame = pair_frame([1.0, -1.0, 5.0], tie=[False, False, True])
    [test] = compare({"a": frame, "b": frame})
    assert (test.pairs, test.first_accuracy) == (2, 0.5)


def test_one_prompt_gives_a_difference_without_an_interval():
    frame = pair_frame([1.0, -1.0], cluster="p")
    [test] = compare({"a": frame, "b": frame.assign(chosen_score=1.0)})
    assert test.difference.value == -0.5 and math.isnan(test.difference.low)


@pytest.mark.parametrize("prompts", [2, 3, 4, 5, 6, 7])
def test_intervals_of_few_prompts_agree_with_p_values(prompts: int):
    frame = pair_frame([1.0] * prompts, cluster=[f"p{i}" for i in range(prompts)])
    [test] = compare({"a": frame, "b": frame.assign(chosen_score=-1.0)})
    assert test.difference.high == 1 and (test.difference.low > 0) == (test.p_value < 0.05) == (prompts > 5)
    assert math.isnan(test.detectable) == (prompts <= 5), "no difference is above 1"


def test_results_of_other_data_cannot_be_compared():
    other = pair_frame([1.0], comparison_id="elsewhere")
    with pytest.raises(DataError, match="a and b have no scored pairs in common: they are of other data"):
        compare({"a": pair_frame([1.0]), "b": other})
    with pytest.raises(DataError, match="with another cluster_by"):
        compare({"a": pair_frame([1.0]), "b": pair_frame([1.0], cluster="user 7")})
