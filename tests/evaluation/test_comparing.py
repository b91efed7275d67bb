"""Paired tests against Student's and against every flip of signs, and how often they are wrong by mistake."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tests.pair_frames import pair_frame
from vlmrm.errors import DataError
from vlmrm.measures.differences import chance_of_largest, compare

RNG = np.random.default_rng(0)
MERIT = RNG.normal(0.8, 1, 300)
PROMPTS = [f"p{i // 3}" for i in range(300)]


def checkpoint(noise: float):
    return pair_frame(MERIT + RNG.normal(0, noise, 300), prompt_id=PROMPTS)


def test_chance_is_that_of_every_flip_of_whole_prompts():
    """Of eight prompts there are 256 flips, with the t of the sums of each prompt."""
    differences, prompts = RNG.normal(size=(24, 2)), np.repeat(np.arange(8), 3)
    sums = differences.reshape(8, 3, 2).sum(axis=1)
    every = [
        np.abs(ttest_1samp(np.array(signs)[:, None] * sums, 0).statistic).max() for signs in product((-1, 1), repeat=8)
    ]
    drawn = chance_of_largest(differences, prompts)
    quantiles = [0.25, 0.5, 0.75]
    assert np.quantile(drawn, quantiles) == pytest.approx(np.quantile(every, quantiles), rel=0.05)
    assert set(drawn.round(3)) <= set(np.round(every, 3))


def test_difference_is_that_of_the_pairs_with_their_prompts_drawn_together():
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


def test_every_two_of_several_are_compared_and_hold_together():
    frames = {name: checkpoint(noise) for name, noise in (("a", 0.1), ("b", 1.0), ("c", 3.0))}
    tests = compare(frames)
    assert [(test.first, test.second) for test in tests] == [("a", "b"), ("a", "c"), ("b", "c")]
    [alone] = compare({"a": frames["a"], "b": frames["b"]})
    assert alone.difference.value == tests[0].difference.value
    assert alone.p_value <= tests[0].p_value
    assert tests[0].difference.low < alone.difference.low and alone.difference.high < tests[0].difference.high
    for test in tests:
        assert (test.p_value < 0.05) == (not test.difference.low <= 0 <= test.difference.high)


def test_of_eight_equal_checkpoints_none_is_said_to_differ_more_than_once_in_twenty():
    """Lists of nine: the pairs of a prompt share its answers, which took McNemar's test to 35 % of false reports."""
    rng, wrong, sets = np.random.default_rng(1), 0, 200
    first, second = np.triu_indices(9, 1)
    for _ in range(sets):
        answers = rng.normal(0, 1, (30, 1, 9)) + rng.normal(0, 1, (30, 8, 9))
        right = (0.5 + answers[:, :, first] - answers[:, :, second] > 0).transpose(0, 2, 1).reshape(-1, 8)
        couples = np.stack([right[:, i] - right[:, j].astype(float) for i, j in combinations(range(8), 2)], axis=1)
        sums = couples.reshape(30, 36, 28).sum(axis=1)
        found = np.abs(ttest_1samp(sums, 0).statistic).max()
        wrong += found > np.quantile(chance_of_largest(couples, np.repeat(np.arange(30), 36)), 0.95)
    assert wrong / sets <= 0.07


def test_pairs_are_matched_by_what_they_are_not_by_their_place():
    frame = checkpoint(1.0)
    shuffled = frame.sample(frac=1, random_state=0).iloc[:200]
    [test] = compare({"a": frame, "b": shuffled})
    assert test.pairs == 200 and test.difference.value == 0


def test_repeated_comparisons_count_as_often_as_they_come():
    frame = pair_frame([1.0, -1.0, -1.0], comparison_id=["x", "y", "y"], prompt_id=["p", "q", "q"])
    [test] = compare({"a": frame, "b": frame.assign(chosen_score=1.0)})
    assert (test.pairs, test.only_first, test.only_second) == (3, 0, 2)


def test_ties_of_people_are_left_out():
    frame = pair_frame([1.0, -1.0, 5.0], tie=[False, False, True])
    [test] = compare({"a": frame, "b": frame})
    assert (test.pairs, test.first_accuracy) == (2, 0.5)


def test_one_prompt_gives_a_difference_without_an_interval():
    frame = pair_frame([1.0, -1.0], prompt_id="p")
    [test] = compare({"a": frame, "b": frame.assign(chosen_score=1.0)})
    assert test.difference.value == -0.5 and math.isnan(test.difference.low)


@pytest.mark.parametrize("prompts", [2, 3, 4, 5, 6, 7])
def test_few_prompts_that_all_differ_have_an_interval_that_agrees_with_p(prompts: int):
    frame = pair_frame([1.0] * prompts, prompt_id=[f"p{i}" for i in range(prompts)])
    [test] = compare({"a": frame, "b": frame.assign(chosen_score=-1.0)})
    assert test.difference.high == 1 and (test.difference.low > 0) == (test.p_value < 0.05) == (prompts > 5)
    assert math.isnan(test.detectable) == (prompts <= 5), "no difference is above 1"


def test_results_of_other_data_cannot_be_compared():
    other = pair_frame([1.0], comparison_id="elsewhere")
    with pytest.raises(DataError, match="a and b have no scored pairs in common"):
        compare({"a": pair_frame([1.0]), "b": other})
