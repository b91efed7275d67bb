"""Transforms of the raw scores of one group of answers, in numpy: σ, z-scores, ranks, win rates.

Each takes the scores [N] of one group and returns as many float64 numbers, in order. A score is a logit of which only
differences mean something (Bradley and Terry 1952): σ(a - b) is the probability that a is preferred to b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.measures.bradley_terry import logistic

FLOOR = 1e-6  # least standard deviation to divide by

Transform = Callable[[ArrayLike], np.ndarray]


def raw(scores: ArrayLike) -> np.ndarray:
    """Return the scores [N] unchanged, in float64."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1:
        raise RewardError(f"the scores of a group have shape {values.shape}: give one number for each answer.")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RewardError(f"score {index} of the group is {values[index]}: leave out what could not be scored.")
    return values


def sigmoid(scores: ArrayLike) -> np.ndarray:
    """Return σ(s) [N], in [0, 1]: each score by itself, whatever the group."""
    return logistic(raw(scores))


def zscore(scores: ArrayLike) -> np.ndarray:
    """Return (s - mean) / max(std, 1e-6) [N] over the group, std of the population; 0 where all scores are equal."""
    values = raw(scores)
    if not len(values) or (values == values[0]).all():
        return np.zeros(len(values))
    return (values - values.mean()) / max(float(values.std()), FLOOR)


def rank(scores: ArrayLike) -> np.ndarray:
    """Return the share of the group with a lower score [N]: 0, 1/N, ... (N-1)/N; ties share their mean rank."""
    values = raw(scores)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    lower = np.cumsum(counts) - counts
    return (lower + (counts - 1) / 2)[inverse] / max(len(values), 1)


def win_rate(scores: ArrayLike) -> np.ndarray:
    """Return the mean of σ(s_i - s_j) over the other answers j [N]: how often i is preferred; alone, 0.5."""
    values = raw(scores)
    if len(values) < 2:
        return np.full(len(values), 0.5)
    wins = logistic(values[:, None] - values[None, :])
    return (wins.sum(axis=1) - 0.5) / (len(values) - 1)  # less σ(0), its win rate against itself


@dataclass(frozen=True)
class Normalization:
    """(s - mean) / std [N] by the held-out scores that a checkpoint carries: the same in every group."""

    mean: float
    std: float

    def __call__(self, scores: ArrayLike) -> np.ndarray:
        return (raw(scores) - self.mean) / max(self.std, FLOOR)


TRANSFORMS: dict[str, Transform] = {
    "raw": raw,
    "sigmoid": sigmoid,
    "zscore": zscore,
    "rank": rank,
    "win_rate": win_rate,
}
SCALED = ("normalized", "percentile", "probability")  # by what a checkpoint carries of its scores on reference data


def scale_for(info: Mapping[str, Any], output: str | None) -> Mapping[str, Any]:
    """Return where `reward_model.json` has the scale of the total, or of an output."""
    return info if output is None else (info.get("reward_scales") or {}).get(output, {})


def transform_named(
    name: str, info: Mapping[str, Any] | None = None, model: str = "the checkpoint", output: str | None = None
) -> Transform:
    """Return one of `TRANSFORMS`, or of `SCALED` by `info`, the `reward_model.json` of `model`, for an output or all.

    transform_named("percentile", scorer.loaded.info, output="clarity")([4.2])
    """
    if name in TRANSFORMS:
        return TRANSFORMS[name]
    if name not in SCALED:
        raise ConfigError(f"the transform is {name!r}: choose one of {', '.join([*TRANSFORMS, *SCALED])}.")
    info = scale_for(info or {}, output)
    mean, std, quantiles = (info.get(f"reward_{it}") for it in ("mean", "std", "quantiles"))
    temperature = info.get("reward_temperature")
    if name == "normalized" and mean is not None and std is not None:
        return Normalization(float(mean), float(std))
    if quantiles:
        shares = np.linspace(0.0, 1.0, len(quantiles))
        if name == "percentile":  # the share of the reference scores that are lower
            return lambda scores: np.interp(raw(scores), quantiles, shares)
        if name == "probability" and temperature:  # that people prefer it to a middling answer of the reference data
            middle = np.interp(0.5, shares, quantiles)
            return lambda scores: logistic((raw(scores) - middle) / temperature)
    of = f" of {output}" if output else ""
    if quantiles and name == "probability":
        raise CheckpointError(
            f"{model} has no probability{of}: its reference data have no pair or rating, or it orders all of them as "
            "people do: take percentile, or measure it on other data with `vlmrm calibrate`."
        )
    raise CheckpointError(
        f"{model} has no scale{of} for {name} in its reward_model.json: measure it with `vlmrm calibrate`, or choose "
        "another transform."
    )
