"""Rewards into advantages: Flow-Factory's `sum` and `gdpo`, in float64, with missing rewards kept neutral.

Standard deviations are of the population and at least 1e-6. A missing reward (NaN) is taken as the mean of its group,
so that it neither rewards nor punishes; where the whole group has none, as the mean of all; where nobody has one, the
reward is left out. A sample without any reward has the advantage 0 and is in no statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object

from vlmrm.errors import ConfigError, RewardError
from vlmrm.scoring.missing import with_group_means

FLOOR = 1e-6

# rewards by name [N], weights by name, group number of each sample [N] → advantages [N]; of all ranks together.
Aggregator = Callable[[Mapping[str, np.ndarray], Mapping[str, float], np.ndarray], np.ndarray]


def advantages(
    rewards: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    groups: Sequence[Hashable],
    method: str | Aggregator = "gdpo",
    *,
    global_std: bool = True,
) -> np.ndarray:
    """The advantage of each of this rank's N samples, with statistics over the samples of all ranks.

    Args:
        rewards: by name, [N], NaN where missing.
        groups: the id of each sample's group; equal on any rank is one group.
        method: `sum`: of the weighted sum R of rewards, (R - mean of the group) / std, over all samples with
            `global_std`, else over the group. `gdpo` (Liu et al. 2026, Group reward-Decoupled Normalization Policy
            Optimization): the weighted sum of each reward's own (r - mean) / std over the group, then normalised over
            all samples with `global_std`. Or a function.

    Raises:
        ConfigError: for another method.
        RewardError: when a function answers another number of advantages, or one that is no number.
    """
    if isinstance(method, str) and method not in METHODS:
        raise ConfigError(f"advantages by {method!r}: choose from {', '.join(METHODS)}, or give a function.")
    everyone, codes, mine = _of_all_ranks(rewards, groups)
    return _aggregate(everyone, weights, codes, method, global_std)[mine]


def without_missing(rewards: Mapping[str, np.ndarray], groups: Sequence[Hashable]) -> dict[str, np.ndarray]:
    """Return this rank's rewards as `advantages` takes them: by name, [N], NaN in samples without any reward.

    A collective call: the mean of a group is that of its samples on all ranks.
    """
    everyone, codes, mine = _of_all_ranks(rewards, groups)
    known = _known(everyone)
    codes = _codes(codes[known])
    found = {}
    for name, values in everyone.items():
        found[name] = np.full(len(known), np.nan)
        found[name][known] = _filled(values[known], codes)
    return {name: values[mine] for name, values in found.items()}


def _of_all_ranks(
    rewards: Mapping[str, np.ndarray], groups: Sequence[Hashable]
) -> tuple[dict[str, np.ndarray], np.ndarray, slice]:
    """The rewards of all ranks one after another, their groups numbered, and where this rank's are."""
    shares = gather_object([(list(groups), {name: np.asarray(value, np.float64) for name, value in rewards.items()})])
    everyone = {name: np.concatenate([share[1][name] for share in shares]) for name in rewards}
    codes = _codes([group for share in shares for group in share[0]])
    first = sum(len(share[0]) for share in shares[: PartialState().process_index])
    return everyone, codes, slice(first, first + len(groups))


def _known(rewards: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which samples have any reward: [N]."""
    return ~np.all([np.isnan(values) for values in rewards.values()], axis=0)


def _aggregate(rewards, weights, codes: np.ndarray, method: str | Aggregator, global_std: bool) -> np.ndarray:
    if not isinstance(method, str):
        found = np.asarray(method(rewards, weights, codes), dtype=np.float64)
        if found.shape != codes.shape or not np.isfinite(found).all():
            raise RewardError(f"the aggregation answered {found.shape} advantages for {len(codes)} samples, or NaN.")
        return found
    known = _known(rewards)
    codes = _codes(codes[known])
    filled = {name: _filled(values[known], codes) for name, values in rewards.items()}
    found = np.zeros(len(known))
    found[known] = METHODS[method](filled, weights, codes, global_std)
    return found


def _sum(rewards, weights, codes: np.ndarray, global_std: bool) -> np.ndarray:
    total = np.sum([weights[name] * values for name, values in rewards.items()], axis=0)
    centred, deviation = _in_groups(total, codes)
    if global_std:
        deviation = np.full(len(total), total.std() if len(total) else 0.0)
    return centred / np.maximum(deviation, FLOOR)


def _gdpo(rewards, weights, codes: np.ndarray, global_std: bool) -> np.ndarray:
    total = np.zeros(len(codes))
    for name, values in rewards.items():
        centred, deviation = _in_groups(values, codes)
        total += weights[name] * centred / np.maximum(deviation, FLOOR)
    if not global_std or not len(total):
        return total
    return (total - total.mean()) / max(float(total.std()), FLOOR)


METHODS: dict[str, Callable[..., np.ndarray]] = {"sum": _sum, "gdpo": _gdpo}


def _in_groups(values: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value less its group's mean, exactly 0 where the group is constant, and the group's deviation: [N] each."""
    sizes = np.bincount(codes)
    centred = values - (np.bincount(codes, values) / sizes)[codes]
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, codes, values)
    np.maximum.at(high, codes, values)
    centred[(low == high)[codes]] = 0.0
    return centred, np.sqrt(np.bincount(codes, centred**2) / sizes)[codes]


def _filled(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Missing values replaced by their group's mean, else the mean of all, else 0."""
    if not np.isnan(values).any():
        return values
    overall = 0.0 if np.isnan(values).all() else np.nanmean(values)
    means = with_group_means(values, codes.tolist())
    return np.where(np.isnan(means), overall, means)


def _codes(groups: Sequence[Hashable] | np.ndarray) -> np.ndarray:
    """Groups numbered from 0 in the order of their first sample: ids of any kind and size stay apart."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in list(groups)], dtype=np.int64)
