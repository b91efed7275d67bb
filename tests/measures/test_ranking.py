"""Rank correlations against scipy's, list by list, and the best-of-N curve against every possible draw."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import spearmanr

from vlmrm.measures.intervals import Correlation
from vlmrm.measures.statistics import best_of_n, spearman_within

RNG = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(12), [2, 3, 4, 5, 3, 2, 6, 4, 3, 5, 2, 1])[RNG.permutation(40)]
RATINGS = RNG.integers(0, 4, 40).astype(float)
SCORES = (RATINGS + RNG.normal(0, 1, 40)).round()  # rounded, so that some tie


def lists() -> list[tuple[np.ndarray, np.ndarray]]:
    places = [np.flatnonzero(np.equal(GROUPS, group)) for group in range(12)]
    return [(SCORES[place], RATINGS[place]) for place in places]


def test_correlations_are_scipys():
    expected = [
        math.nan if len(set(r)) < 2 else spearmanr(s, r).statistic if len(set(s)) > 1 else 0.0 for s, r in lists()
    ]
    assert spearman_within(SCORES, RATINGS, GROUPS) == pytest.approx(expected, nan_ok=True)
    assert Correlation(SCORES, RATINGS).influence().value == pytest.approx(spearmanr(SCORES, RATINGS).statistic)


def test_without_an_order_there_is_no_correlation():
    for ratings in (np.ones(3), np.zeros(0)):
        scores, groups = np.arange(len(ratings)), np.zeros(len(ratings), dtype=int)
        assert all(map(math.isnan, spearman_within(scores, ratings, groups)))
    equal = np.ones(3), np.arange(3.0), np.zeros(3, dtype=int)
    assert spearman_within(*equal) == 0


def test_best_of_n_is_the_mean_over_draws():
    curve = best_of_n(SCORES, RATINGS, GROUPS)
    assert curve.shape == (12, 3, 6)
    for of_list, (s, r) in zip(curve, lists(), strict=True):
        for n in range(1, 7):
            if len(s) < max(n, 2):
                assert np.isnan(of_list[:, n - 1]).all()
            else:
                expected = [expectation(s, r, n), expectation(r, r, n), r.mean()]
                assert of_list[:, n - 1] == pytest.approx(expected)


def expectation(scores: np.ndarray, ratings: np.ndarray, n: int) -> float:
    draws = [list(draw) for draw in combinations(range(len(scores)), n)]
    return float(np.mean([ratings[draw][scores[draw] == scores[draw].max()].mean() for draw in draws]))
