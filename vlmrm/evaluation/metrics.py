"""How well scores agree with preferences: small pure functions over numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmrm.data.schema import Comparison
from vlmrm.evaluation.calibration import negative_log_likelihood

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


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


def weighted_accuracy(margins: np.ndarray, weights: np.ndarray) -> float:
    """Share of the weight of pairs with margins[N] above zero; a pair whose weight is NaN does not count.

    With the share of raters who agreed as weight, a pair that people disputed counts less. NaN for no weight.
    """
    known = ~np.isnan(weights)
    total = weights[known].sum()
    return float((weights * (margins > 0))[known].sum() / total) if total > 0 else float("nan")


def groupwise_right(margins: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each group, in ascending order of groups[N]: whether all its margins are above zero."""
    _, codes = np.unique(groups, return_inverse=True)
    return np.bincount(codes, weights=margins <= 0) == 0


def groupwise_accuracy(margins: np.ndarray, groups: np.ndarray) -> float:
    """acc+: share of comparisons, told apart by groups[N], of which every pair is right. NaN for no pairs."""
    return float(groupwise_right(margins, groups).mean()) if len(margins) else float("nan")


def distribution(values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation, range and quantiles of values[N]; all NaN for no values."""
    if not len(values):
        values = np.array([np.nan])
    quantiles = np.quantile(values, QUANTILES)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        **{f"q{round(100 * q):02d}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


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
