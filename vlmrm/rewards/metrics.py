"""What a round's rewards tell of the run, over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from vlmrm.scoring.transforms import FLOOR


def statistics(
    rewards: Mapping[str, np.ndarray], weights: Mapping[str, float], codes: np.ndarray | None
) -> dict[str, float]:
    """Return the metrics of each reward and of pairs of them; a figure that nothing tells is NaN.

    A reward of weight 0 trains nothing: it is held out, and `held_out` its correlation within groups with the total of
    the others, which falls where the policy learns to please those alone (Gao et al. 2022, "Scaling Laws for Reward
    Model Overoptimization").

    Args:
        rewards: by name, [N], NaN where missing.
        codes: the number of each sample's group, [N], from 0; None where there are no groups.
    """
    metrics: dict[str, float] = {}
    for name, values in rewards.items():
        present = values[~np.isnan(values)]
        metrics[f"rewards/{name}/mean"] = float(present.mean()) if len(present) else float("nan")
        metrics[f"rewards/{name}/std"] = float(present.std()) if len(present) else float("nan")
        metrics[f"rewards/{name}/missing"] = 1 - len(present) / max(len(values), 1)
        metrics[f"rewards/{name}/saturation"] = _saturation(present)
        if codes is not None:
            deviations = _group_deviations(values, codes)
            metrics[f"rewards/{name}/group_std"] = float(deviations.mean()) if len(deviations) else float("nan")
            metrics[f"rewards/{name}/no_signal"] = _no_signal(_neutral(values, codes), codes)
    for one, other in combinations(rewards, 2):
        metrics[f"rewards/correlation/{one}/{other}"] = _correlation(rewards[one], rewards[other])
    if codes is not None:
        held_out = [name for name in rewards if weights[name] == 0]
        total = weighted_total(rewards, weights, len(codes))
        for name in held_out if len(held_out) < len(rewards) else ():
            metrics[f"rewards/{name}/held_out"] = _correlation(_centred(total, codes), _centred(rewards[name], codes))
        neutral = {name: _neutral(values, codes) for name, values in rewards.items()}
        metrics["rewards/no_signal"] = _no_signal(weighted_total(neutral, weights, len(codes)), codes)
    return metrics


def weighted_total(rewards: Mapping[str, np.ndarray], weights: Mapping[str, float], size: int) -> np.ndarray:
    """Return the weighted sum [N], NaN where a reward of a weight is missing; one held out, of weight 0, may be."""
    parts = [weights[name] * values for name, values in rewards.items() if weights[name] != 0]
    return np.sum(parts, axis=0) if parts else np.zeros(size)


def _saturation(present: np.ndarray) -> float:
    """Return the share of the rewards at the round's lowest or highest, whichever is more often; 1 if all are equal.

    Beyond one in N, it is a scale that ends there: clipping, a judge's best grade, a rule that all fulfil.
    """
    if not len(present):
        return float("nan")
    return float(max(np.mean(present == present.min()), np.mean(present == present.max())))


def _group_deviations(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the population's std of each group with two rewards or more."""
    present = ~np.isnan(values)
    sizes = np.bincount(codes[present])
    squares = np.bincount(codes[present], _centred(values, codes)[present] ** 2)
    return np.sqrt(squares[sizes > 1] / sizes[sizes > 1])


def _neutral(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the values less the mean of their group, a missing one as 0: so they count in advantages."""
    return np.nan_to_num(_centred(values, codes), nan=0.0)


def _no_signal(values: np.ndarray, codes: np.ndarray) -> float:
    """Return the share of the groups of two or more whose values are all alike."""
    deviations = _group_deviations(values, codes)
    return float(np.mean(deviations < FLOOR)) if len(deviations) else float("nan")


def _centred(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the values less the mean of their group's present ones; NaN stays."""
    present = ~np.isnan(values)
    size = int(codes.max(initial=-1)) + 1
    counts = np.bincount(codes[present], minlength=size)
    sums = np.bincount(codes[present], values[present], minlength=size)
    return values - (sums / np.maximum(counts, 1))[codes]


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Pearson's correlation over the samples that have both; NaN where one is constant."""
    both = ~np.isnan(one) & ~np.isnan(other)
    if both.sum() < 2 or min(one[both].std(), other[both].std()) < FLOOR:
        return float("nan")
    return float(np.corrcoef(one[both], other[both])[0, 1])
