"""Choose the best checkpoint of a sweep, by a metric or within one standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from vlmrm.errors import ConfigError
from vlmrm.evaluation.schema import Best, Row
from vlmrm.measures.analysis import metric as figure_of
from vlmrm.measures.intervals import Estimate, Figure
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.pair_arrays import PairArrays
from vlmrm.measures.selection import contributions, without_luck

CATEGORY, BENCHMARK = "accuracy/", "benchmark/"
MEAN = "mean "  # begins the name of a figure that is the mean of several sets


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
    """

    metric: str = "preference_accuracy"
    one_standard_error: bool = False

    def __post_init__(self):
        named = self.metric.startswith((CATEGORY, BENCHMARK))
        choosable = [metric.name for metric in METRICS.values() if metric.better]  # each has a standard error
        if not named and self.metric not in choosable:
            raise ConfigError(
                f"metric_for_best is {self.metric}, by which no checkpoint is better than another: choose "
                f"accuracy/CATEGORY, benchmark/NAME, {', '.join(sorted(choosable))}."
            )

    @property
    def label(self) -> str:
        """Return the metric as results name it."""
        return self.metric

    @property
    def higher_is_better(self) -> bool:
        return self.metric not in METRICS or METRICS[self.metric].better == "higher"

    def value(self, row: Row) -> float:
        """Return the row's figure."""
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

    def best(self, rows: Sequence[Row], frame: pd.DataFrame | None = None) -> Best | None:
        """Return the first of `ranked`, in the form of the results file.

        Args:
            frame: the scored pairs of all rows, from which its figure without the luck of the choice follows.
        """
        ranked = self.ranked(rows)
        if not ranked:
            return None
        row = ranked[0]
        return {
            "metric": self.label,
            "one_standard_error": self.one_standard_error,
            "value": self.value(row),
            "without_luck": self._without_luck(ranked, frame),
            "model": row["model"],
            "checkpoint": row["checkpoint"],
            "path": row["path"],
        }

    def _without_luck(self, ranked: Sequence[Row], frame: pd.DataFrame | None) -> dict[str, Any] | None:
        if frame is None:
            return None
        parts = dict(iter(frame.groupby(["model", "checkpoint"], sort=False)))
        measured = [parts[key] for row in ranked if (key := (row["model"], row["checkpoint"])) in parts]
        honest = self.without_luck(measured) if len(measured) == len(ranked) else None
        return None if honest is None else honest._asdict()

    def without_luck(self, parts: Sequence[pd.DataFrame], of: str | None = None) -> Estimate | None:
        """Return a figure of the checkpoint that this criterion chooses, without the luck of the choice.

        Args:
            parts: the scored pairs of each checkpoint.
            of: the metric that is reported; by default the one that chooses.

        Returns:
            The estimate; None where the figure is no sum over prompts, such as that of a benchmark, or where
            fewer than two prompts are common to all.
        """
        by = [self._figure(part, self.metric) for part in parts]
        reported = by if of is None else [self._figure(part, of) for part in parts]
        if not parts or any(figure is None for figure, _ in (*by, *reported)):
            return None
        estimates = [figure.estimate(PairArrays(part).prompts) for figure, part in by if figure is not None]
        values, errors = (np.array([getattr(e, name) for e in estimates]) for name in ("value", "standard_error"))
        errors = np.nan_to_num(errors)  # of one prompt, to which nothing is close
        models = [str(part["model"].iloc[0]) for part in parts]
        steps = [_step_number(str(part["checkpoint"].iloc[0])) for part in parts]
        sign = -1 if self.higher_is_better else 1

        def pick(drawn: np.ndarray) -> int:
            losses = sign * drawn
            best = min(range(len(losses)), key=lambda i: (losses[i], steps[i]))
            if not self.one_standard_error:
                return best
            within = (i for i in range(len(losses)) if losses[i] <= losses[best] + errors[best])
            return min((i for i in within if models[i] == models[best]), key=steps.__getitem__)

        def added(figures: Sequence[tuple[Figure | None, pd.DataFrame]]) -> list[pd.Series]:
            return [contributions(figure, part["prompt_id"]) for figure, part in figures if figure is not None]

        figure, part = reported[pick(values)]
        assert figure is not None
        if len(parts) == 1:
            return figure.estimate(PairArrays(part).prompts)
        return without_luck((figure, part["prompt_id"].to_numpy()), added(reported), pick, added(by))

    @staticmethod
    def _figure(part: pd.DataFrame, name: str) -> tuple[Figure | None, pd.DataFrame]:
        """Return a figure of scored pairs, and the pairs that it is of; None where it has no value for each prompt."""
        if name.startswith(CATEGORY):
            part, name = part[part["category"] == name.removeprefix(CATEGORY)], "preference_accuracy"
        computed = METRICS[name].compute(PairArrays(part)) if name in METRICS and len(part) else None
        usable = isinstance(computed, Figure) and np.isfinite(computed.influence().value)
        return (computed if usable else None), part

    def require(self, rows: Sequence[Row]) -> None:
        """Check that one of the rows can be chosen, unless none has figures."""
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
    return _step_number(row["checkpoint"])


def _step_number(checkpoint: str) -> float:
    step = step_of(checkpoint)
    return math.inf if step is None else step
