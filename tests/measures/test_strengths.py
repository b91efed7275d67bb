"""Strengths against an independent fit, and ranks that hold: the truth is in their confidence sets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, log_expit

from vlmrm.measures.strengths import PRIOR, ahead_of, connected, fit, groups, standings, wins


def answers(skills, prompts: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Credits of models of such skills, prompts, weights; some prompts are harder for all of them."""
    rng = np.random.default_rng(seed)
    hard = np.repeat(rng.normal(0, 1, prompts), size)[:, None]
    chance = expit(np.log(np.divide(skills, np.subtract(1, skills))) + hard)
    right = (rng.random(chance.shape) < chance).astype(float)
    return right, np.repeat(np.arange(prompts), size), np.full(prompts * size, 1 / size)


@pytest.mark.parametrize("seed", range(4))
def test_strengths_are_those_of_an_optimiser_that_knows_no_newton(seed):
    rng = np.random.default_rng(seed)
    won = rng.gamma(0.3, 20, (6, 6)) * (rng.random((6, 6)) < 0.8) + 0.01
    np.fill_diagonal(won, 0)

    def loss(free):
        strengths = np.append(free, -free.sum())
        return -(won * log_expit(strengths[:, None] - strengths[None, :])).sum()

    expected = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-8}).x
    assert fit(won)[:5] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("first", "second"), [(30, 10), (1, 3000)])
def test_two_models_have_the_log_odds_of_their_wins(first, second):
    strengths = fit(np.array([[0.0, first], [second, 0.0]]))
    assert strengths[0] - strengths[1] == pytest.approx(np.log(first / second))


def test_a_prompt_counts_once_and_equal_credits_are_half_a_win():
    credits = np.array([[1, 0], [1, 0], [0, 1], [0.5, 0.5], [1, np.nan]])
    won = wins(credits, ["list", "list", "list", "pair", "alone"], np.array([1 / 3, 1 / 3, 1 / 3, 1, 1]))
    assert won.sum(axis=0) == pytest.approx(np.array([[0, 2 / 3 + 1 / 2], [1 / 3 + 1 / 2, 0]]))
    first, second = standings(credits, ["list", "list", "list", "pair", "alone"], np.array([1 / 3] * 3 + [1, 1]))
    odds = (2 / 3 + 1 / 2 + PRIOR) / (1 / 3 + 1 / 2 + PRIOR)
    assert first.strength.value == pytest.approx(expit(np.log(odds) / 2))
    assert (first.rank, second.rank) == (1, 2)
    assert (first.strength.n, first.strength.prompts, second.strength.n) == (5, 3, 4)


def test_a_set_that_is_missing_favours_nobody():
    """Both models are equally good; the second was measured on the easy half alone, where its accuracy is higher."""
    rng = np.random.default_rng(0)
    chance = np.repeat([0.95, 0.55], 2000)[:, None]
    credits = (rng.random((4000, 3)) < chance).astype(float)
    credits[2000:, 1] = np.nan
    assert np.nanmean(credits[:, 1]) > np.nanmean(credits[:, 0]) + 0.15
    found = standings(credits, np.arange(4000), np.ones(4000))
    assert {standing.group for standing in found} == {"a"}
    assert all(abs(standing.strength.value - 0.5) < 0.01 for standing in found)


def test_pairs_of_one_prompt_that_say_the_same_say_it_once():
    credits, prompts, weights = answers([0.8, 0.6, 0.5], 50, 1, 0)
    repeated = standings(credits.repeat(4, axis=0), prompts.repeat(4), weights.repeat(4) / 4)
    for once, four in zip(standings(credits, prompts, weights), repeated, strict=True):
        assert four.strength[:4] == pytest.approx(once.strength[:4]) and four[1:] == once[1:]
        assert (four.strength.n, four.strength.prompts) == (200, 50)


def test_models_without_a_common_pair_are_apart():
    credits = np.array([[1, 0, np.nan, np.nan], [np.nan, 1, 1, np.nan], [np.nan, np.nan, np.nan, 1]])
    assert connected(credits).tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="not connected"):
        standings(credits, [0, 1, 2], np.ones(3))


def test_one_prompt_has_a_rank_without_an_interval():
    first, second = standings(np.array([[1.0, 0.0]]), ["one"], np.ones(1))
    assert (first.rank, first.best_rank, first.worst_rank, first.group) == (1, 1, 2, "a")
    assert np.isnan(second.strength.low)


def test_letters_are_shared_by_neighbours_that_cannot_be_told_apart():
    ahead = np.zeros((4, 4), dtype=bool)
    ahead[0, 2] = ahead[0, 3] = ahead[1, 3] = True  # each from the next but one
    assert groups(np.array([3.0, 2.0, 1.0, 0.0]), ahead) == ["a", "ab", "bc", "c"]
    shuffled = [2, 0, 3, 1]
    assert groups(np.array([1.0, 3.0, 0.0, 2.0]), ahead[np.ix_(shuffled, shuffled)]) == ["bc", "a", "c", "ab"]


def test_identical_models_share_everything():
    right = (np.arange(60) % 3 > 0).astype(float)
    found = standings(np.stack([right, right, 1 - right], axis=1), np.arange(60), np.ones(60))
    assert found[0].strength == pytest.approx(found[1].strength) and found[0][1:] == found[1][1:]
    assert [(s.rank, s.best_rank, s.worst_rank) for s in found] == [(1, 1, 2), (1, 1, 2), (3, 3, 3)]


@pytest.mark.parametrize("prompts", [10, 60])
def test_the_true_ranks_and_strengths_are_in_their_sets_as_often_as_they_say(prompts):
    """Six models, of which three are equal, on lists of three pairs; their strengths are those of 40,000 prompts."""
    skills = [0.92, 0.7, 0.7, 0.7, 0.62, 0.5]
    best, worst = [1, 2, 2, 2, 5, 6], [1, 4, 4, 4, 5, 6]
    true = [found.strength.value for found in standings(*answers(skills, 40000, 3, 1000))]
    trials = [standings(*answers(skills, prompts, 3, seed)) for seed in range(60)]
    held = [
        all(s.best_rank <= b and w <= s.worst_rank for s, b, w in zip(t, best, worst, strict=True)) for t in trials
    ]
    assert np.mean(held) >= 0.93
    covered = [s.strength.low <= value <= s.strength.high for t in trials for s, value in zip(t, true, strict=True)]
    assert 0.92 <= np.mean(covered) <= 0.98
    if prompts == 60:
        resolved = [t[0].worst_rank == 1 for t in trials]
        assert np.mean(resolved) >= 0.5, "a set that holds everything says nothing"


@pytest.mark.parametrize("prompts", [8, 80])
def test_a_false_lead_is_rarer_than_one_in_twenty(prompts):
    equal = [standings(*answers([0.7] * 8, prompts, 2, seed)) for seed in range(120)]
    leads = sum(any(s.best_rank > 1 for s in found) for found in equal)
    assert leads <= 11  # of 120 at 5 %: more has a probability of 2 %


def test_prompts_that_all_say_the_same_are_ahead_when_they_are_enough():
    for prompts, leads in ((1, False), (3, False), (12, True)):
        won = np.tile([0.1, -0.1], (prompts, 1))
        assert ahead_of(won).tolist() == [[False, leads], [False, False]]
