"""Calibration against loops over the definition and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss

from vlmrm.measures.statistics import CalibrationError, fitted_temperature, log_losses, reliability, squared_errors

MARGINS = np.random.default_rng(0).normal(0.6, 1.5, 500)
BOTH = np.concatenate([expit(MARGINS), expit(-MARGINS)])  # the event and its opposite
HAPPENED = np.repeat([1, 0], len(MARGINS))


def preferences(temperature: float, count: int = 20_000) -> np.ndarray:
    """Margins of a model whose preferences people share with probability σ(margin / temperature)."""
    rng = np.random.default_rng(1)
    margins = np.abs(rng.normal(0, 2, count))
    return np.where(rng.random(count) < expit(margins / temperature), margins, -margins)


def calibration_error(margins: np.ndarray) -> float:
    return CalibrationError(margins).influence().value


def test_loss_and_brier_are_those_of_both_directions():
    assert log_losses(MARGINS).mean() == pytest.approx(log_loss(HAPPENED, BOTH))
    assert squared_errors(MARGINS).mean() == pytest.approx(brier_score_loss(HAPPENED, BOTH))
    assert log_losses(np.array([-1000.0])).mean() == 1000, "large margins stay finite"


def test_reliability_is_the_loop_over_bins():
    table, bins, error = reliability(MARGINS), np.floor(BOTH * 10), 0.0
    for i, row in enumerate(table):
        inside = bins == i
        assert (row.low, row.high, row.count) == (pytest.approx(i / 10), pytest.approx((i + 1) / 10), inside.sum())
        assert row.probability == pytest.approx(BOTH[inside].mean())
        assert row.frequency == pytest.approx(HAPPENED[inside].mean())
        error += inside.mean() * abs(BOTH[inside].mean() - HAPPENED[inside].mean())
    assert calibration_error(MARGINS) == pytest.approx(error)


def test_sure_pairs_fill_outer_bins_and_ties_middle():
    table = reliability(margins := np.array([1000.0, 0.0]))
    assert [row.count for row in table] == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert calibration_error(margins) == 0
    assert math.isnan(table[1].probability)


@pytest.mark.parametrize("truth", [1.0, 3.0])
def test_a_model_is_told_its_temperature(truth):
    margins = preferences(truth)
    temperature = fitted_temperature(margins)
    assert temperature == pytest.approx(truth, rel=0.05)
    assert calibration_error(margins / temperature) < 0.01
    assert (calibration_error(margins) > 0.1) == (truth > 1)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e4])
def test_temperature_is_the_likeliest(unit):
    fitted = fitted_temperature(MARGINS * unit) / unit
    by_search = minimize_scalar(lambda t: log_losses(MARGINS / t).mean(), bounds=(0.1, 50), method="bounded").x
    regression = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10)
    regression.fit(np.concatenate([MARGINS, -MARGINS])[:, None], HAPPENED)
    assert fitted == pytest.approx(by_search, rel=1e-4)
    assert fitted == pytest.approx(1 / regression.coef_.item(), rel=1e-4)


def test_temperature_of_extremes():
    assert fitted_temperature(np.array([1.0, 0.5])) == 0
    assert fitted_temperature(np.array([1.0, -1.0])) == math.inf
    assert fitted_temperature(np.array([0.0, 0.0])) == math.inf
