"""Scores as signs of a success, against sklearn's AUC and logistic regression, and planted scores."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vlmrm_robots.trajectories.reward_models import area_under_curve, fitted_curve


def drawn(count: int, seed: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Scores of failures around 0 and of successes around 1.2."""
    chance = np.random.default_rng(seed)
    good = np.arange(count) < count // 2
    scores = chance.normal(size=count) + 1.2 * good
    return np.round(scores) if ties else scores, good


@pytest.mark.parametrize("ties", [False, True])
def test_the_area_matches_sklearn_and_mann_whitney_doubts(ties):
    scores, good = drawn(40, 0, ties)

    area, doubt = area_under_curve(scores, good)

    assert area == pytest.approx(roc_auc_score(good, scores)) and doubt < 0.01
    assert area_under_curve(np.zeros(40), good)[1] > 0.4


def test_the_curve_matches_logistic_regression_on_smoothed_targets():
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
