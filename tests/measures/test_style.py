"""Style: markup counted by hand, and accuracy at equal style against scikit-learn's regression and a planted truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from tests.pair_frames import pair_frame
from vlmrm.measures.analysis import figures
from vlmrm.measures.statistics import AtEqualStyle, markup

RNG = np.random.default_rng(0)


def test_markup_is_headings_items_bold_and_code():
    assert markup("# Title\n- one\n* two\n1. three\n**bold** and `code`, 2 * 3 * 4, a - b") == 6
    assert markup("plain text, with a - b and 3. May") == markup("") == 0


def test_it_is_the_intercept_of_a_logistic_regression():
    x = RNG.normal(size=(4000, 2))
    y = (RNG.random(4000) < expit(0.7 + x @ [1.0, -0.5])).astype(float)
    found = AtEqualStyle(y, x).estimate(np.arange(4000))
    regression = LogisticRegression(C=np.inf, tol=1e-9).fit(x, y)
    assert found.value == pytest.approx(expit(regression.intercept_.item()), abs=1e-3)
    assert found.low < expit(0.7) < found.high
    design = np.column_stack([np.ones(4000), x])
    p = regression.predict_proba(x)[:, 1]
    error = math.sqrt(np.linalg.inv((design * (p * (1 - p))[:, None]).T @ design)[0, 0])
    assert found.standard_error == pytest.approx(found.value * (1 - found.value) * error, rel=0.05)


def test_style_control_removes_the_gain_of_length():
    """Longer answers are chosen in 80 %, and the model likes length as much as merit."""
    longer = np.where(RNG.random(4000) < 0.8, 1, -1) * RNG.integers(20, 150, 4000)
    merit = RNG.normal(0, 1, 4000)
    frame = pair_frame(merit + longer / 60, chosen_length=200 + longer, rejected_length=200)
    of = figures(frame)
    assert of["preference_accuracy"]["value"] > 0.7
    assert of["style_controlled_accuracy"]["value"] < 0.6
