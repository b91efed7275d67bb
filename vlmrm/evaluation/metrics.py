"""How well scores agree with preferences: small pure functions over numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmrm.data.schema import Comparison


@dataclass(frozen=True)
class ScoredPairs:
    """The pairs of scored comparisons, as arrays [N]. A pair that people tied has `tie`; its order means nothing."""

    ids: list[str]
    categories: list[str | None]
    chosen: np.ndarray
    rejected: np.ndarray
    tie: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """Score of the chosen minus score of the rejected, of the pairs with a preference."""
        return (self.chosen - self.rejected)[~self.tie]

    def of_category(self, category: str | None) -> ScoredPairs:
        keep = np.array([name == category for name in self.categories], dtype=bool)
        pick = np.flatnonzero(keep)
        return ScoredPairs(
            [self.ids[i] for i in pick],
            [self.categories[i] for i in pick],
            self.chosen[keep],
            self.rejected[keep],
            self.tie[keep],
        )


def scored_pairs(comparisons: Sequence[Comparison], scores: Sequence[Sequence[float]]) -> ScoredPairs:
    """Every pair of every comparison with its two scores; `scores[i]` has one score a branch."""
    rows = [
        (comparison.id, comparison.category, branch_scores[chosen], branch_scores[rejected], tie)
        for comparison, branch_scores in zip(comparisons, scores, strict=True)
        for chosen, rejected, tie in comparison.pairs()
    ]
    ids, categories, chosen, rejected, tie = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return ScoredPairs(
        list(ids),
        list(categories),
        np.array(chosen, dtype=np.float64),
        np.array(rejected, dtype=np.float64),
        np.array(tie, dtype=bool),
    )


def preference_accuracy(margins: np.ndarray) -> float:
    """Share of margins[N] above zero. Equal scores are not right; `score_ties` counts them. NaN for no pairs."""
    return float(np.mean(margins > 0)) if len(margins) else float("nan")


def accuracy_half_ties(margins: np.ndarray) -> float:
    """Share of margins[N] above zero, with half a point for each at zero. NaN for no pairs."""
    return float(np.mean((margins > 0) + 0.5 * (margins == 0))) if len(margins) else float("nan")


def negative_log_likelihood(margins: np.ndarray) -> float:
    """Mean -log σ(margin): the Bradley-Terry loss of the preferences."""
    return float(np.mean(np.logaddexp(0.0, -margins))) if len(margins) else float("nan")


def summary(pairs: ScoredPairs) -> dict[str, float]:
    """The figures of the framework's result tables."""
    margins = pairs.margins
    any_margins = len(margins) > 0
    return {
        "preference_accuracy": preference_accuracy(margins),
        "average_margin": float(margins.mean()) if any_margins else float("nan"),
        "margin_std": float(margins.std()) if any_margins else float("nan"),
        "sample_count": len(margins),
        "score_ties": int((margins == 0).sum()),
        "tied_pairs": int(pairs.tie.sum()),
        "loss": negative_log_likelihood(margins),
    }


def summary_by_category(pairs: ScoredPairs) -> dict[str, dict[str, float]]:
    """`summary` of each category, in order of name; empty when no row has one."""
    names = sorted({name for name in pairs.categories if name is not None})
    return {name: summary(pairs.of_category(name)) for name in names}


def trl_summary(pairs: ScoredPairs) -> dict[str, float]:
    """The same figures under TRL's names, which dashboards know; exact over all pairs."""
    margins = pairs.margins
    rewards = np.concatenate([pairs.chosen, pairs.rejected])
    return {
        "loss": negative_log_likelihood(margins),
        "accuracy": preference_accuracy(margins),
        "margin": float(margins.mean()) if len(margins) else float("nan"),
        "margin_std": float(margins.std()) if len(margins) else float("nan"),
        "mean_reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "min_reward": float(rewards.min(initial=np.inf)),
        "max_reward": float(rewards.max(initial=-np.inf)),
        "pairs": len(margins),
    }
