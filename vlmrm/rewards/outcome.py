"""What a reward set makes of samples: rewards by name, what failed and why, their advantages and metrics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrm.errors import RewardError
from vlmrm.rewards.advantages import Aggregator, advantages


@dataclass(frozen=True)
class Rewards:
    """The rewards of N samples by name, [N] in float64; NaN where one is missing.

    `failures` (why a sample had none, also where a fallback took its place) and `info` (what the model said) are by
    name and sample; `seconds` are of computing, by name, added up over threads; `counters` are the models'
    own, of all that they have done.
    """

    rewards: dict[str, np.ndarray]
    weights: dict[str, float]
    groups: list[Hashable] | None
    failures: dict[str, dict[int, str]]
    info: dict[str, dict[int, dict[str, Any]]]
    seconds: dict[str, float]
    counters: dict[str, dict[str, float]]

    def total(self) -> np.ndarray:
        """The weighted sum of the rewards: [N], NaN where one of them is missing."""
        return np.sum([self.weights[name] * values for name, values in self.rewards.items()], axis=0)

    def advantages(self, method: str | Aggregator = "gdpo", *, global_std: bool = True) -> np.ndarray:
        """`vlmrm.rewards.advantages.advantages` of them: [N]. A collective call: every rank makes it.

        Raises:
            RewardError: when the samples have no groups.
        """
        if self.groups is None:
            raise RewardError("advantages are within groups: give groups=, the id of each sample's prompt.")
        return advantages(self.rewards, self.weights, self.groups, method, global_std=global_std)

    def metrics(self) -> dict[str, float]:
        """Mean, deviation, failures, seconds and counters of each reward on this rank, for a tracker."""
        found: dict[str, float] = {}
        for name, values in self.rewards.items():
            there = values[~np.isnan(values)]
            found[f"rewards/{name}/mean"] = float(there.mean()) if len(there) else float("nan")
            found[f"rewards/{name}/std"] = float(there.std()) if len(there) else float("nan")
            found[f"rewards/{name}/failures"] = len(self.failures[name])
            found[f"rewards/{name}/seconds"] = self.seconds[name]
            found |= {f"rewards/{name}/{counter}": count for counter, count in self.counters[name].items()}
        return found
