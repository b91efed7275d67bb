"""Choose the best checkpoint of a sweep, by a metric or within one standard error, and test whether two differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from scipy.stats import binomtest, false_discovery_control

from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.schema import Best, Row
from vlmrm.measures.analysis import metric as figure_of
from vlmrm.measures.intervals import DRAWS, Estimate, estimate, resample, sums_by_cluster
from vlmrm.measures.metrics import METRIC, METRICS
from vlmrm.measures.pairs import check_pairs, margins_of, pair_index

# Metrics that have a better end, and those of them that have a standard error.
CHOOSABLE = {metric.name for metric in METRICS if metric.better}
ESTIMATED = {metric.name for metric in METRICS if metric.better and metric.kind is Estimate}
CATEGORY, BENCHMARK = "accuracy/", "benchmark/"


def step_of(checkpoint: str) -> int | None:
    """Return the training step in a checkpoint's name, such as checkpoint-500."""
    number = checkpoint.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def split_metric(metric: str) -> tuple[str | None, str]:
    """Return the set and the figure of `metric_for_best`, SET:FIGURE; no set for a figure alone."""
    name, colon, figure = metric.partition(":")
    return (name, figure) if colon and "/" not in name else (None, metric)


@dataclass(frozen=True)
class Criterion:
    """The criterion by which the checkpoints of a sweep are compared.

    `metric` is a figure of `vlmrm.measures.analysis`, `accuracy/CATEGORY` or `benchmark/NAME`. With
    `one_standard_error` the best is the checkpoint with the fewest steps among those of the same training that are
    within one standard error of the best: where the data do not distinguish them, the one trained least
    (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3).

    Raises:
        ConfigError: for a figure that does not exist, has no better end, or has no standard error if one is needed.
    """

    metric: str = "preference_accuracy"
    one_standard_error: bool = False

    def __post_init__(self):
        named = self.metric.startswith((CATEGORY, BENCHMARK))
        if not named and self.metric not in CHOOSABLE:
            raise ConfigError(
                f"metric_for_best is {self.metric}, by which no checkpoint is better than another: choose "
                f"accuracy/CATEGORY, benchmark/NAME, {', '.join(sorted(CHOOSABLE))}."
            )
        with_error = self.metric.startswith(CATEGORY) or self.metric in ESTIMATED
        if self.one_standard_error and not with_error:
            raise ConfigError(
                f"one_standard_error needs a metric with a standard error, which {self.metric} has not: choose "
                f"accuracy/CATEGORY, {', '.join(sorted(ESTIMATED))}."
            )

    @property
    def label(self) -> str:
        """Return the metric as results name it."""
        return self.metric

    @property
    def higher_is_better(self) -> bool:
        return self.metric not in METRIC or METRIC[self.metric].better == "higher"

    def value(self, row: Row) -> float:
        """Return the row's figure.

        Raises:
            ConfigError: when the row does not have it, naming the missing column.
        """
        return figure_of(self._figures(row), self.metric)

    def ranked(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that have the figure, the best first; of equal ones the one with fewer steps.

        Empty where no row has it, or its standard error is needed and unknown: `require` raises the reason.
        """
        having = [row for row in rows if not row["error"] and not math.isnan(self.number(row, "value"))]
        ranked = sorted(having, key=lambda row: (self._loss(row), _steps(row)))
        if not self.one_standard_error or not ranked:
            return ranked
        best = ranked[0]
        error = self.number(best, "standard_error")
        if math.isnan(error):
            return []
        close = [r for r in ranked if r["model"] == best["model"] and self._loss(r) <= self._loss(best) + error]
        first = min(close, key=_steps)
        return [first, *(row for row in ranked if row is not first)]

    def best(self, rows: Sequence[Row]) -> Best | None:
        """Return the first of `ranked`, in the form of the results file."""
        ranked = self.ranked(rows)
        if not ranked:
            return None
        row = ranked[0]
        return {
            "metric": self.label,
            "one_standard_error": self.one_standard_error,
            "value": self.value(row),
            "model": row["model"],
            "checkpoint": row["checkpoint"],
            "path": row["path"],
            "kept": None,
        }

    def require(self, rows: Sequence[Row]) -> None:
        """Check that one of the rows can be chosen, unless none has figures.

        Raises:
            ConfigError: when the figure, or its standard error, is missing.
        """
        measured = [row for row in rows if not row["error"]]
        if not measured or self.ranked(rows):
            return
        self.value(measured[0])
        raise ConfigError(
            f"one_standard_error needs the standard error of {self.metric}, which fewer than two prompts do not give: "
            "evaluate on more."
        )

    def _figures(self, row: Row) -> Mapping[str, Any]:
        """Return the row's figures of the metric's kind, by name."""
        if self.metric.startswith(CATEGORY):
            categories = row["statistics"]["category"]
            return {f"{CATEGORY}{name}": figures["preference_accuracy"] for name, figures in categories.items()}
        if self.metric.startswith(BENCHMARK):
            return {f"{BENCHMARK}{name}": value for name, value in row.get("benchmark", {}).items()}
        return cast(Mapping[str, Any], row["statistics"]["overall"])

    def number(self, row: Row, part: str) -> float:
        """Return `value`, `low`, `high` or `standard_error` of the row's figure, NaN where there is none."""
        figure = self._figures(row).get(self.metric, math.nan)
        if isinstance(figure, Mapping):
            return float(figure[part])
        return float(figure) if part == "value" else math.nan

    def _loss(self, row: Row) -> float:
        value = self.number(row, "value")
        return -value if self.higher_is_better else value


def _steps(row: Row) -> float:
    step = step_of(row["checkpoint"])
    return math.inf if step is None else step


class PairedTest(NamedTuple):
    """A test of two checkpoints on the same pairs; equal scores are wrong.

    `difference` is the accuracy of `first` minus that of `second`, with an interval that resamples prompts.
    `p_value` is McNemar's, exact: the probability, if both were equally good, of so uneven a split of the pairs that
    only one of them has right. It takes pairs as independent; where prompts have several, trust the interval.
    `adjusted_p_value` controls the false discovery rate of all tests made together (Benjamini and Hochberg).
    """

    first: str
    second: str
    pairs: int
    first_accuracy: float
    second_accuracy: float
    difference: Estimate
    only_first: int
    only_second: int
    p_value: float
    adjusted_p_value: float


def compare(frames: Mapping[str, pd.DataFrame]) -> list[PairedTest]:
    """Test each two of `frames`, scored pairs by checkpoint, on the pairs that all of them have.

    Raises:
        DataError: when they have no pair in common that people did not tie, or a frame cannot be used.
    """
    if len(frames) < 2:
        return []
    right, prompts = _right_of_shared_pairs(frames)
    count = len(right)
    sums = sums_by_cluster(np.concatenate([right, np.ones((count, 1))], axis=1), prompts)
    drawn = resample(sums)
    samples = drawn[:, :-1] / drawn[:, -1:] if len(sums) > 1 else np.full((DRAWS, len(frames)), np.nan)
    accuracies = right.mean(axis=0)
    tests = []
    for (i, first), (j, second) in combinations(enumerate(frames), 2):
        only_first, only_second = int((right[:, i] > right[:, j]).sum()), int((right[:, j] > right[:, i]).sum())
        tests.append(
            PairedTest(
                first=first,
                second=second,
                pairs=count,
                first_accuracy=float(accuracies[i]),
                second_accuracy=float(accuracies[j]),
                difference=estimate(
                    float(accuracies[i] - accuracies[j]), samples[:, i] - samples[:, j], count, len(sums)
                ),
                only_first=only_first,
                only_second=only_second,
                p_value=mcnemar(only_first, only_second),
                adjusted_p_value=float("nan"),
            )
        )
    adjusted = false_discovery_control([test.p_value for test in tests])
    return [test._replace(adjusted_p_value=float(p)) for test, p in zip(tests, adjusted, strict=True)]


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of the pairs that only one of two models has right; 1 if there are none."""
    return float(binomtest(only_first, only_first + only_second).pvalue) if only_first + only_second else 1.0


def _right_of_shared_pairs(frames: Mapping[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each of M checkpoints has each shared pair right, [N, M] of 0 and 1, and the prompts [N]."""
    tables = []
    for name, frame in frames.items():
        check_pairs(frame)
        margins = pd.Series(margins_of(frame), index=pair_index(frame), name=name)
        tables.append(margins.dropna())  # people's ties
    shared = reduce(lambda index, table: index.intersection(table.index, sort=False), tables[1:], tables[0].index)
    if not len(shared):
        raise DataError(f"{' and '.join(frames)} have no scored pairs in common: compare results of the same data")
    right = np.stack([table.loc[shared].to_numpy() > 0 for table in tables], axis=1).astype(np.float64)
    return right, shared.get_level_values("prompt_id").to_numpy()
