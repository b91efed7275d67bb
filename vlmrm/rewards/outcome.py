"""The result of a reward set: rewards by name, failures, advantages, metrics, and the audit log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.ranks import gather, rank, world_size
from vlmrm.rewards.samples import Samples
from vlmrm.scoring.transforms import FLOOR


@dataclass(frozen=True)
class Rewards:
    """The rewards of N samples by name, [N] in float64, NaN where one is missing."""

    rewards: dict[str, np.ndarray]
    weights: dict[str, float]
    groups: list[Hashable] | None
    failures: dict[str, dict[int, str]]  # by name and sample index, also of those that got a fallback
    info: dict[str, dict[int, dict[str, Any]]]  # details of the model, by name and sample index
    seconds: dict[str, float]  # of computing, summed over threads
    counters: dict[str, dict[str, float]]  # of the models since they were loaded

    def total(self) -> np.ndarray:
        """Return the weighted sum of the rewards: [N], NaN where one is missing; one of weight 0 may be."""
        return weighted_total(self.rewards, self.weights, len(next(iter(self.rewards.values()))))

    def advantages(self, method: str | Aggregator = "gdpo", *, global_std: bool = True) -> np.ndarray:
        """Return `vlmrm.rewards.outcome.advantages` of the rewards: [N]. A collective call: every rank makes it."""
        if self.groups is None:
            raise RewardError("advantages are within groups: give groups=, the id of each sample's prompt.")
        return advantages(self.rewards, self.weights, self.groups, method, global_std=global_std)

    def metrics(self) -> dict[str, float]:
        """Return `statistics`, failures, seconds and counters over all ranks, for a tracker.

        A collective call: every rank makes it, also where one logs.
        """
        groups = range(len(next(iter(self.rewards.values())))) if self.groups is None else self.groups
        all_rewards, codes, _ = _of_all_ranks(self.rewards, groups)
        metrics = statistics(all_rewards, self.weights, None if self.groups is None else codes)
        sums: dict[str, float] = {}
        for name in self.rewards:
            sums[f"rewards/{name}/failures"] = len(self.failures[name])
            sums[f"rewards/{name}/seconds"] = self.seconds[name]
            sums |= {f"rewards/{name}/{counter}": count for counter, count in self.counters[name].items()}
        for share in gather(sums):
            for name, value in share.items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics


# Rewards by name [N], weights by name, group of each sample as a number [N] → advantages [N]; over all ranks.
Aggregator = Callable[[Mapping[str, np.ndarray], Mapping[str, float], np.ndarray], np.ndarray]


def advantages(
    rewards: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    groups: Sequence[Hashable],
    method: str | Aggregator = "gdpo",
    *,
    global_std: bool = True,
) -> np.ndarray:
    """Return the advantage of each of this rank's N samples, with statistics over the samples of all ranks.

    These are Flow-Factory's `sum` and `gdpo`, in float64; its `gdpo` ignores `global_std=False`. Standard deviations
    are of the population and at least 1e-6. A missing reward (NaN) counts as the mean of its group, so that it is
    neutral; where the whole group has none, as the mean of all samples; a reward that no sample has is left out. A
    sample without any reward has the advantage 0 and is in no statistic.

        advantages({"clip": np.array([1.0, 0.0])}, {"clip": 1.0}, groups=["a", "a"])  # [1, -1]

    Args:
        rewards: by name, [N], NaN where missing.
        groups: the id of each sample's group; equal ids are one group, on any rank.
        method: `sum`: of the weighted sum R of rewards, (R - mean of the group) / std, over all samples with
            `global_std`, else over the group. `gdpo` (Liu et al. 2026, Group reward-Decoupled Normalization Policy
            Optimization): the weighted sum of each reward's own (r - mean) / std over the group, then normalised over
            all samples with `global_std`. Or a function.
    """
    if isinstance(method, str) and method not in METHODS:
        raise ConfigError(f"advantages by {method!r}: choose from {', '.join(METHODS)}, or give a function.")
    all_rewards, codes, own_slice = _of_all_ranks(rewards, groups)
    return _aggregate(all_rewards, weights, codes, method, global_std)[own_slice]


def without_missing(
    rewards: Mapping[str, np.ndarray], groups: Sequence[Hashable], *, everywhere: bool = False
) -> dict[str, np.ndarray]:
    """Return this rank's rewards by name, [N], with what neither pays nor punishes in the place of a missing one.

    As in `advantages` that is the mean of its group, else of all samples. A sample without any reward has the mean of
    its group; in a group without any it is NaN, or with `everywhere` the mean of all samples. A reward that no sample
    has is NaN.

    A collective call: means are over all ranks.
    """
    all_rewards, codes, own_slice = _of_all_ranks(rewards, groups)
    has_any = _has_any_reward(all_rewards)
    filled = {}
    for name, values in all_rewards.items():
        filled[name] = np.full(len(has_any), np.nan)
        if not np.isnan(values).all():
            filled[name][has_any] = _filled(values[has_any], _codes(codes[has_any]))
            overall = np.nanmean(filled[name]) if everywhere else np.nan
            filled[name] = _first_of(filled[name], group_means(filled[name], codes), overall)
    return {name: values[own_slice] for name, values in filled.items()}


def _of_all_ranks(
    rewards: Mapping[str, np.ndarray], groups: Sequence[Hashable]
) -> tuple[dict[str, np.ndarray], np.ndarray, slice]:
    """Return the rewards of all ranks in order, the number of each sample's group, and the slice of this rank."""
    shares = gather((list(groups), {name: np.asarray(value, np.float64) for name, value in rewards.items()}))
    all_rewards = {name: np.concatenate([share[1][name] for share in shares]) for name in rewards}
    codes = _codes([group for share in shares for group in share[0]])
    first = sum(len(share[0]) for share in shares[: rank()])
    return all_rewards, codes, slice(first, first + len(groups))


def _has_any_reward(rewards: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which samples have any reward: [N]."""
    return ~np.all([np.isnan(values) for values in rewards.values()], axis=0)


def _aggregate(rewards, weights, codes: np.ndarray, method: str | Aggregator, global_std: bool) -> np.ndarray:
    if not isinstance(method, str):
        result = np.asarray(method(rewards, weights, codes), dtype=np.float64)
        if result.shape != codes.shape or not np.isfinite(result).all():
            raise RewardError(f"the aggregation returned {result.shape} advantages for {len(codes)} samples, or NaN.")
        return result
    has_any = _has_any_reward(rewards)
    codes = _codes(codes[has_any])
    filled = {name: _filled(values[has_any], codes) for name, values in rewards.items()}
    result = np.zeros(len(has_any))
    result[has_any] = METHODS[method](filled, weights, codes, global_std)
    return result


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
    if not global_std or not len(total):  # an empty batch has no mean
        return total
    return (total - total.mean()) / max(float(total.std()), FLOOR)


METHODS: dict[str, Callable[..., np.ndarray]] = {"sum": _sum, "gdpo": _gdpo}


def _in_groups(values: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each value less its group's mean and the group's std: [N] each.

    Centred values are exactly 0 in a constant group.
    """
    sizes = np.bincount(codes)
    centred = _centred(values, codes)
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, codes, values)
    np.maximum.at(high, codes, values)
    # Rounding of the mean would leave a residue, which division by the floor magnifies to an advantage.
    centred[(low == high)[codes]] = 0.0
    return centred, np.sqrt(np.bincount(codes, centred**2) / sizes)[codes]


def _filled(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the values with NaN as the group's mean, else the mean of all, else 0."""
    overall = 0.0 if np.isnan(values).all() else np.nanmean(values)
    return _first_of(values, group_means(values, codes), overall)


def _first_of(values: np.ndarray, means: np.ndarray, overall: float) -> np.ndarray:
    """Return each value, where there is none the mean, where there is none `overall`: [N]."""
    return np.where(np.isnan(values), np.where(np.isnan(means), overall, means), values)


def group_means(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the mean of the rewards that each one's group has: [N], NaN where it has none."""
    present = ~np.isnan(values)
    size = int(codes.max(initial=-1)) + 1
    counts = np.bincount(codes[present], minlength=size)
    sums = np.bincount(codes[present], values[present], minlength=size)
    return np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)[codes]


def _codes(groups: Sequence[Hashable] | np.ndarray) -> np.ndarray:
    """Return the number of each sample's group, from 0 by first sample: ids of any type and size stay distinct."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in list(groups)], dtype=np.int64)


def statistics(
    rewards: Mapping[str, np.ndarray], weights: Mapping[str, float], codes: np.ndarray | None
) -> dict[str, float]:
    """Return the metrics of each reward and of pairs of them; a figure that nothing tells is NaN.

    A reward of weight 0 trains nothing: it is held out, and `held_out` its correlation within groups with the total of
    the others, which falls where the policy learns to please those alone (Gao et al. 2022, "Scaling Laws for Reward
    Model Overoptimization"). `rewards` are by name, [N], NaN where missing; `codes` [N] number each sample's group.
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
    return values - group_means(values, codes)


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Pearson's correlation over the samples that have both; NaN where one is constant."""
    both = ~np.isnan(one) & ~np.isnan(other)
    if both.sum() < 2 or min(one[both].std(), other[both].std()) < FLOOR:
        return float("nan")
    return float(np.corrcoef(one[both], other[both])[0, 1])


class AuditLog:
    """A JSONL file that every reward is appended to; of several ranks each has its own, `NAME.rank1.jsonl`."""

    def __init__(self, path: str | Path):
        path = Path(path)
        if world_size() > 1:
            path = path.with_suffix(f".rank{rank()}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.round = 0

    def write(self, outcome: Rewards, samples: Samples) -> None:
        """Append one line for each sample and reward: time, round, sample, group, prompt, reward and error.

        The model's details are under `extra`, since their names are the model's own. A round that ends in an error has
        no lines for what was not computed.
        """
        now = time.time()
        with open(self.path, "a", encoding="utf-8") as file:
            for index in range(len(samples)):
                for name, values in outcome.rewards.items():
                    value, error = float(values[index]), outcome.failures[name].get(index)
                    if error is None and not math.isfinite(value):
                        continue
                    line: dict[str, Any] = {
                        "time": now,
                        "round": self.round,
                        "sample": index,
                        "group": None if samples.groups is None else samples.groups[index],
                        "prompt": samples.columns["prompt"][index],
                        "reward_name": name,
                        "reward": value if math.isfinite(value) else None,
                        "error": error,
                        "extra": outcome.info[name].get(index, {}),
                    }
                    file.write(json.dumps(line, default=_text, ensure_ascii=False) + "\n")
        self.round += 1


def _text(value: Any) -> Any:
    """Return numbers of arrays and tensors as numbers; anything else, such as an image, as its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
