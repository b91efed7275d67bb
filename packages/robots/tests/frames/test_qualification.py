"""Which scorers qualify as rewards, and the figures and bounds behind it, against their definitions."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from robot_worlds.planted import FALSE, GOOD, planted, share
from scipy.stats import beta, binom
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from vlmrm_robots.frames.qualification import (
    HeldOut,
    before_success,
    choose_threshold,
    episodes_needed,
    lower_mean,
    qualify,
    same_step,
    upper_bound,
)
from vlmrm_robots.frames.settings import Limits

EXACT = Limits(ignore_around=0)
GOOD_SCORE, NOISY = GOOD["good"][0], GOOD["noisy"][0]

# Which qualify -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 20])
@pytest.mark.parametrize("kind", FALSE)
def test_scorers_that_do_not_see_success_do_not_qualify(kind, size):
    """Of each, at most one in twenty may; `python -m robot_worlds.planted` draws more."""
    assert share(FALSE[kind], size, size, 6) <= 1 / 6


@pytest.mark.parametrize("kind", GOOD)
def test_scorers_that_see_success_qualify(kind):
    score, late = GOOD[kind]
    assert share(score, 20, 20, 6, late) >= 5 / 6
    if "noisy" not in kind:
        assert share(score, 8, 8, 6, late) >= 5 / 6 and share(score, 20, 5, 6, late) >= 5 / 6


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "scenery and clock",
            r"it may know scenery and step alone \(train on failures from the starts of successes\)",
        ),
        ("near success", r"6 steps before a success it scores below .* raise ignore_around"),
        ("look-alikes", r"it fires in \d+ of the 20 held-out episodes that fail, so that .* max_false_fires, 50%"),
        ("constant", r"no threshold rewards more successes than it fires for nothing"),
    ],
)
def test_a_refusal_says_why_and_what_to_collect(kind, reason):
    assert re.search(reason, str(qualify(planted(FALSE[kind], 20, 20, 1), Limits()).reason))


def test_successes_at_one_step_need_failures_of_the_same_scenery():
    """Where every success begins at one step, scenery and clock know as much as the eye, and failures must tell."""
    for score in (FALSE["scenery and clock"], GOOD_SCORE):
        reason = qualify(planted(score, 20, 20, 0, start=25), Limits()).reason
        assert reason is not None and "cannot be told" in reason and "collect failures from the starts of" in reason
    for score, seen in ((FALSE["clock"], False), (GOOD_SCORE, True)):
        held_out = planted(score, 20, 20, 0, start=25)
        twins = replace(held_out, sceneries=np.zeros(len(held_out.labels)))  # the failures start as successes do
        assert (qualify(twins, Limits()).reason is None) == seen


@pytest.mark.parametrize(("successes", "failures"), [(5, 8), (0, 8), (8, 0)])
def test_few_episodes_show_nothing(successes, failures):
    reason = qualify(planted(GOOD_SCORE, successes, failures, 0), Limits()).reason
    assert reason is not None
    assert f"{successes} held-out episodes show a success" in reason if successes < 6 else "0 of the 0 held" in reason


# Thresholds ----------------------------------------------------------------------------------------------------------


def test_each_half_is_proved_by_the_threshold_of_the_other():
    held_out, second = planted(FALSE["random"], 10, 10, 3), np.arange(20) % 2 == 1
    played, verdict = held_out.played(5), qualify(held_out, Limits())
    chosen = [choose_threshold([played[i] for i in np.flatnonzero(second == half)]) for half in (False, True)]
    assert verdict.threshold == max(chosen) != min(chosen)
    above = [one.scores[one.failure] > chosen[not half] for one, half in zip(played, second, strict=True)]
    assert verdict.figures["false_positive_rate"] == pytest.approx(np.concatenate(above).mean())
    assert verdict.figures["false_fires"] == sum(one.any() for one in above[10:])
    recall = (held_out.scores[held_out.labels == 1] > verdict.threshold).mean()
    assert verdict.figures["recall"] == pytest.approx(recall)


def test_the_threshold_wins_most_successes_for_its_fires():
    played = planted(NOISY, 8, 8, 1).played(0)

    def gain(threshold: float) -> float:
        recall = np.mean([(one.scores[one.success] > threshold).mean() for one in played if one.succeeds])
        return float(recall - 2 * np.mean([one.peak > threshold for one in played]))

    chosen = choose_threshold(played)
    assert gain(chosen) == pytest.approx(max(gain(score) for one in played for score in one.scores))
    perfect = planted(lambda chance, start: 1.0 * (np.arange(40) >= start), 8, 8, 1).played(0)
    assert choose_threshold(perfect) == 0.5  # the middle
    assert choose_threshold([one for one in perfect if not one.succeeds]) == 0  # nothing is above


# Bounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "of"), [(0, 5), (3, 8), (8, 8), (25, 40)])
def test_bounds_of_whole_episodes_are_clopper_and_pearsons(count, of):
    assert binom.cdf(count, of, upper_bound(count, of)) == pytest.approx(0.05 if count < of else 1.0)
    exact = beta.ppf(0.025, count, of - count + 1) if count else 0.0
    assert lower_mean(np.arange(of) < count) == pytest.approx(exact, abs=0.015)
    assert (upper_bound(0, of) <= 0.4) == (of >= episodes_needed(0.4))


def test_bounds_of_shares_hold_as_often_as_they_say():
    chance = np.random.default_rng(0)
    shares = [chance.beta(4, 1, 10) * (chance.random(10) < 0.9) for _ in range(100)]  # of one in ten episodes none
    assert np.mean([lower_mean(drawn) <= 0.9 * 0.8 for drawn in shares]) >= 0.94
    assert np.mean([lower_mean(drawn) for drawn in shares]) > 0.35  # and says something


def test_figures_match_scikit_learn_by_frame():
    held_out = planted(NOISY, 6, 6, 2)
    found, scores, labels = qualify(held_out, EXACT, 2.5).figures, held_out.scores, held_out.labels
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores))
    assert found["precision"] == pytest.approx(precision_score(labels, scores > 2.5))
    assert found["recall"] == pytest.approx(recall_score(labels, scores > 2.5))
    assert found["false_positive_rate"] == pytest.approx((scores > 2.5)[~labels].mean())
    assert found["precision_low"] < found["precision"] and found["ignored_frames"] == 0


def test_failures_near_a_success_do_not_count():
    steps = np.arange(12)
    labels = (steps >= 6) & (steps < 8)
    [one] = HeldOut(0.0 + steps, labels, 0 * steps, steps, 0 * steps).played(2)
    assert one.failure.tolist() == (np.abs(steps - 6.5) > 3).tolist()
    assert before_success([one]).tolist() == [1.0]  # 6 and 7 are above 3


def test_successes_are_compared_at_the_same_step_alone():
    held_out = planted(NOISY, 6, 3, 4)
    played = held_out.played(0)
    starts = [int(one.success.argmax()) for one in played[:6]]
    pairs = [(a, b) for a, b in product(range(6), repeat=2) if starts[b] > starts[a]]
    right = [played[a].scores[starts[a]] > played[b].scores[starts[a]] for a, b in pairs]
    share_right, chance, at_best = same_step(played)
    assert share_right == pytest.approx(np.mean(right)) and chance < 0.05
    ranks = [1 + sum(a == first for a, _ in pairs) for first in range(6)]
    assert at_best == pytest.approx(1 / np.prod(ranks))
