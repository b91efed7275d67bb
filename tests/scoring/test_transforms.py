"""Transforms of a group's scores, against scipy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.measures.outputs import TOTAL, Reference, scale_of
from vlmrm.scoring.transforms import (
    TRANSFORMS,
    Normalization,
    rank,
    sigmoid,
    transform_named,
    win_rate,
    zscore,
)

GROUPS = [[0.3], [1.0, -2.0], [0.5, 0.5, 3.0, -1.0, 0.5], list(np.random.default_rng(0).normal(size=40) * 9)]


@pytest.mark.parametrize("scores", GROUPS)
def test_transforms_are_scipy_s(scores):
    count = len(scores)
    assert TRANSFORMS["raw"](scores).tolist() == scores
    assert sigmoid(scores) == pytest.approx(special.expit(scores), rel=1e-12)
    assert rank(scores) == pytest.approx((stats.rankdata(scores) - 1) / count, abs=1e-12)
    if count > 1:
        assert zscore(scores) == pytest.approx(stats.zscore(scores), abs=1e-12)
        against = [
            np.mean([special.expit(a - b) for j, b in enumerate(scores) if j != i]) for i, a in enumerate(scores)
        ]
        assert win_rate(scores) == pytest.approx(against, abs=1e-12)


def test_groups_without_differences_have_no_winner():
    assert zscore([2.5, 2.5, 2.5]).tolist() == [0, 0, 0]
    assert win_rate([2.5, 2.5]).tolist() == [0.5, 0.5]
    assert rank([2.5, 2.5]).tolist() == [0.25, 0.25]
    assert win_rate([7.0]).tolist() == [0.5] and zscore([7.0]).tolist() == [0.0] and rank([7.0]).tolist() == [0.0]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_empty_groups_stay_empty_and_scores_stay_finite(name):
    assert TRANSFORMS[name]([]).shape == (0,)
    assert np.isfinite(TRANSFORMS[name]([1e4, -1e4, 0.0])).all()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nonfinite_or_misshapen_scores_are_refused_by_place(name):
    with pytest.raises(RewardError, match="score 1 of the group is nan"):
        TRANSFORMS[name]([0.0, float("nan")])
    with pytest.raises(RewardError, match=r"shape \(1, 2\)"):
        TRANSFORMS[name]([[0.0, 1.0]])


def test_saved_normalisation_is_the_checkpoint_s():
    normalised = transform_named("normalized", {"reward_mean": 2.0, "reward_std": 4.0})
    assert normalised([2.0, 10.0, 0.0]).tolist() == [0.0, 2.0, -0.5]
    assert normalised == Normalization(2.0, 4.0)
    with pytest.raises(CheckpointError, match=r"outputs/best has no scale for normalized .*vlmrm calibrate"):
        transform_named("normalized", {"reward_mean": 2.0, "reward_std": None}, "outputs/best")


def test_percentiles_and_probabilities_are_of_reference_scores():
    scores = np.random.default_rng(0).normal(2.0, 3.0, 5000)
    drawn = np.random.default_rng(1).random(20000) < 1 / (1 + np.exp(-1))
    scale = scale_of({TOTAL: Reference(scores, np.where(drawn, 1.5, -1.5))})
    shares = transform_named("percentile", scale)([-100.0, 2.0, 5.0, 100.0])
    assert shares == pytest.approx([0.0, 0.5, 0.841, 1.0], abs=0.02)
    better = transform_named("probability", scale)([np.median(scores), np.median(scores) + 1.5])
    assert better == pytest.approx([0.5, 1 / (1 + np.exp(-1))], abs=0.01)
    with pytest.raises(CheckpointError, match="no probability of clear: its reference data have no pair or rating"):
        transform_named("probability", {"reward_scales": {"clear": {"reward_quantiles": [0, 1]}}}, output="clear")


def test_names_are_those_of_the_table():
    assert transform_named("win_rate") is win_rate
    with pytest.raises(ConfigError, match="'softmax': choose one of raw, sigmoid, zscore, rank, win_rate, normalized"):
        transform_named("softmax")
