"""Choose the best checkpoint of a sweep, by a metric or within one standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vlmrm.errors import ConfigError
from vlmrm.evaluation.schema import Best, Row
from vlmrm.measures.analysis import metric as figure_of
from vlmrm.measures.metrics import METRIC, METRICS

CHOOSABLE = {metric.name for metric in METRICS if metric.better}  # each has a standard error
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
        ConfigError: for a figure that does not exist, or has no better end.
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
            return {f"{BENCHMARK}{name}": figure for name, figure in row.get("benchmark", {}).items()}
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
