"""Scores as signs of a success, against sklearn's AUC and logistic regression, and planted scores."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vlmrm_robots.trajectories.reward_models import area_under_curve, fitted_curve, held_out_curves


def drawn(count: int, seed: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Scores of failures around 0 and of successes around 1.2."""
    chance = np.random.default_rng(seed)
    good = np.arange(count) < count // 2
    scores = chance.normal(size=count) + 1.2 * good
    return np.round(scores) if ties else scores, good


def held_out_probabilities(scores: np.ndarray, good: np.ndarray) -> np.ndarray:
    curves = held_out_curves(scores, good)
    return np.array([expit(factor * score + offset) for (factor, offset), score in zip(curves, scores, strict=True)])


@pytest.mark.parametrize("ties", [False, True])
def test_the_area_is_sklearn_s(ties):
    scores, good = drawn(40, 0, ties)
    found = area_under_curve(scores, good)
    assert found.value == pytest.approx(roc_auc_score(good, scores))
    assert found.n == 40 and found.low < found.value < found.high
    # The standard error is about that of a bootstrap within both classes.
    chance, areas = np.random.default_rng(1), []
    for _ in range(2000):
        take = np.concatenate([chance.choice(np.flatnonzero(of), of.sum()) for of in (good, ~good)])
        areas.append(roc_auc_score(good[take], scores[take]))
    assert found.standard_error == pytest.approx(np.std(areas), rel=0.2)


@pytest.mark.parametrize("count", [12, 40])
def test_its_interval_covers_the_truth(count):
    scores, good = drawn(40_000, 0)
    truth = roc_auc_score(good, scores)
    inside = 0
    for seed in range(400):
        found = area_under_curve(*drawn(count, 1 + seed))
        inside += found.low <= truth <= found.high
    assert 0.92 <= inside / 400 <= 0.99


def test_ends_and_absences():
    good = np.array([True] * 6 + [False] * 6)
    perfect = area_under_curve(good.astype(float), good)
    assert perfect.value == 1 == perfect.high and 0.6 < perfect.low < 1
    constant = area_under_curve(np.zeros(12), good)
    assert constant.value == 0.5
    for only in (np.ones(3, dtype=bool), np.zeros(3, dtype=bool), np.zeros(0, dtype=bool)):
        assert np.isnan(area_under_curve(np.arange(len(only)) * 1.0, only)[:3]).all()


def test_the_curve_is_that_of_a_logistic_regression_on_smoothed_targets():
    scores, good = drawn(60, 3)
    scores = 30 * scores - 500  # far from zero, as raw scores may be
    factor, offset = fitted_curve(scores, good)
    # One success among the failures and the other way round, with the weights that make Platt's targets.
    part = np.where(good, (good.sum() + 1) / (good.sum() + 2), ((~good).sum() + 1) / ((~good).sum() + 2))
    regression = LogisticRegression(C=1e9, tol=1e-10, max_iter=10_000)
    scaled = np.concatenate([scores, scores])[:, None] / 30 + 500 / 30
    regression.fit(scaled, np.concatenate([good, ~good]), sample_weight=np.concatenate([part, 1 - part]))
    assert factor * 30 == pytest.approx(regression.coef_.item(), rel=1e-3)
    assert offset + factor * -500 == pytest.approx(regression.intercept_.item(), abs=1e-2)


def test_held_out_probabilities_are_calibrated_and_blind_to_their_own_outcome():
    chance = np.random.default_rng(0)
    truth = expit(2 * chance.normal(size=4000))
    good = chance.random(4000) < truth
    scores = 7 * np.log(truth / (1 - truth)) + 40  # right up to scale and zero
    assert np.abs(held_out_probabilities(scores, good) - truth).mean() < 0.02
    noise, good = chance.normal(size=40), np.arange(40) % 2 == 0
    changed = good.copy()
    changed[[0, 1]] = changed[[1, 0]]  # two outcomes of one fold
    before, after = held_out_probabilities(noise, good), held_out_probabilities(noise, changed)
    assert before[:2] == pytest.approx(after[:2])
    separated = held_out_probabilities(np.arange(20.0), np.arange(20) >= 10)
    assert np.isfinite(separated).all() and (np.diff(separated) > -0.2).all()
    assert np.isnan(held_out_probabilities(np.arange(3.0), np.array([True, False, False]))).all()
    assert np.isfinite(held_out_probabilities(np.zeros(8), np.arange(8) > 3)).all()  # scores without any spread
