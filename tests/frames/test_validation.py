"""Figures on held-out frames, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from vlmrm.frames.validation import auc_and_loss, measures, threshold_logit


def drawn(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.3).astype(float)
    return generator.normal(2 * labels - 1), labels


def test_auc_is_the_share_of_pairs_in_order_and_the_loss_is_cross_entropy():
    logits, labels = drawn()
    auc, loss = auc_and_loss(logits, labels)
    pairs = logits[labels == 1][:, None] - logits[labels == 0][None]
    assert auc == pytest.approx((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
    p = expit(logits)
    assert loss == pytest.approx(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))


@pytest.mark.parametrize("target", [0.0, 0.01, 0.1, 0.5])
def test_the_threshold_is_the_lowest_with_that_false_positive_rate(target):
    logits, labels = drawn()
    threshold = threshold_logit(logits, labels, target)
    failures = logits[labels == 0]
    assert (failures > threshold).mean() <= target
    lower = logits[logits <= threshold].max()  # with the next lower score above it too it would be too many
    assert (failures >= lower).mean() > target


def test_between_classes_the_threshold_is_half_way():
    assert threshold_logit(np.array([-3.0, -1.0, 2.0, 5.0]), np.array([0, 0, 1, 1]), 0.01) == 0.5


def test_measures_of_four_frames():
    found = measures(np.array([-3.0, 1.0, 2.0, -1.0]), np.array([0.0, 0, 1, 1]), threshold=0.0)
    assert (found["precision"], found["recall"], found["false_positive_rate"], found["auc"]) == (0.5, 0.5, 0.5, 0.75)
    assert found["brier"] == pytest.approx(np.mean((expit([-3.0, 1, 2, -1]) - [0, 0, 1, 1]) ** 2))


def test_calibration_error_is_small_where_probabilities_are_true_and_large_where_they_are_not():
    logits, _ = drawn(20_000)
    happened = (np.random.default_rng(1).random(len(logits)) < expit(logits)).astype(float)
    assert measures(logits, happened, 0.0)["calibration_error"] < 0.01
    assert measures(4 * logits, happened, 0.0)["calibration_error"] > 0.1


def test_a_threshold_above_every_frame_leaves_no_precision():
    found = measures(np.array([-1.0, 1.0]), np.array([0.0, 1.0]), threshold=2.0)
    assert np.isnan(found["precision"]) and found["recall"] == 0
