"""Choose the best checkpoint of a sweep, by a metric or within one standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd

from vlmrm.errors import ConfigError
from vlmrm.evaluation.schema import Best, Row
from vlmrm.measures.analysis import metric as figure_of
from vlmrm.measures.intervals import Estimate, Figure, numbered, spread, with_ends
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.pairs import PairArrays
from vlmrm.outputs import FIGURES

CATEGORY, BENCHMARK = "accuracy/", "benchmark/"
ACCURACY = "preference_accuracy"
MEAN = "mean "  # begins the name of a figure that is the mean of several sets
DRAWS, SEED = 400, 0
CELLS = 1 << 22  # draws x clusters held at a time


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

    Of a suite the mean over `sets` is compared. They have no clusters in common, so that its error is that of
    independent figures.
    """

    metric: str = ACCURACY  # a figure of `measures.analysis`, `accuracy/CATEGORY` or `benchmark/NAME`
    sets: tuple[str, ...] = ()

    def __post_init__(self):
        named = self.metric.startswith((CATEGORY, BENCHMARK)) or self.of_output
        choosable = [metric.name for metric in METRICS.values() if metric.better]  # each has a standard error
        if not named and self.metric not in choosable:
            raise ConfigError(
                f"metric_for_best is {self.metric}, by which no checkpoint is better than another: choose "
                f"accuracy/CATEGORY, benchmark/NAME, {', '.join(sorted(choosable))}."
            )

    @property
    def of_output(self) -> bool:
        """Whether it reads as one of the `FIGURES` of an output."""
        ends = self.metric.endswith(tuple(f"_{it}" for it in FIGURES))
        return ends and self.metric not in METRICS and not self.metric.startswith((CATEGORY, BENCHMARK))

    @property
    def label(self) -> str:
        """Return the metric as results name it."""
        if len(self.sets) > 1:
            return f"{MEAN}{self.metric} of {len(self.sets)} sets"
        return ":".join([*self.sets, self.metric])

    @property
    def higher_is_better(self) -> bool:
        if self.metric in METRICS:
            return METRICS[self.metric].better == "higher"
        return not (self.of_output and self.metric.endswith("_error"))

    def for_rows(self, rows: Sequence[Any]) -> Criterion:
        """Return it, or in place of the accuracy of pairs, where rows have none, a figure of the first output."""
        measured = [of_set for row in rows if not row["error"] for of_set in self._by_set(row).values()]
        if (
            self.metric != ACCURACY
            or any(ACCURACY in it for it in measured)
            or not any("outputs" in it for it in measured)
        ):
            return self
        [(output, figures), *_] = next(it["outputs"] for it in measured if "outputs" in it).items()
        return replace(self, metric=f"{output}_{next(name for name in FIGURES if name in figures)}")

    def ranked(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that have the figure, the best first; of equal ones the one with fewer steps.

        Empty where no row has it: `require` raises the reason.
        """
        having = [row for row in rows if not row["error"] and not math.isnan(self.number(row, "value"))]
        sign = -1 if self.higher_is_better else 1
        names = [(row["model"], row["checkpoint"]) for row in having]
        order = self._order([sign * self.number(row, "value") for row in having], names)
        return [having[i] for i in order]

    def _order(self, losses: Sequence[float], names: Sequence[tuple[str, str]]) -> list[int]:
        """Return the numbers of checkpoints of these (model, checkpoint) names, the one to choose first."""
        steps = [math.inf if (step := step_of(name)) is None else step for _, name in names]
        return sorted(range(len(losses)), key=lambda i: (losses[i], steps[i]))

    def best(self, rows: Sequence[Row], frame: pd.DataFrame | None = None) -> Best | None:
        """Return the first of `ranked`, in the form of the results file.

        Its figure without the luck of the choice follows from `frame`, the scored pairs of all rows.
        """
        ranked = self.ranked(rows)
        if not ranked:
            return None
        honest = None
        if frame is not None:
            parts = dict(iter(frame.groupby(["model", "checkpoint"], sort=False)))
            names = [(row["model"], row["checkpoint"]) for row in ranked]
            honest = self.without_luck([parts[name] for name in names]) if parts.keys() >= set(names) else None
        row = ranked[0]
        return {
            "metric": self.label,
            "value": self.number(row, "value"),
            "without_luck": None if honest is None else honest._asdict(),
            "model": row["model"],
            "checkpoint": row["checkpoint"],
            "path": row["path"],
        }

    def without_luck(self, parts: Sequence[pd.DataFrame], of: str | None = None) -> Estimate | None:
        """Return a figure of the checkpoint that this criterion chooses, without the luck of the choice.

        None where it is no sum over clusters, such as a benchmark's, or fewer than two clusters are common to all.
        `parts` are the scored pairs of each checkpoint, `of` is the metric to report, by default the one that chooses.
        """
        by, reported = (
            [found for part in parts if (found := _figure(part, name)) is not None]
            for name in (self.metric, of or self.metric)
        )
        if not parts or not len(by) == len(reported) == len(parts):
            return None
        values = np.array([figure.influence().value for figure, _ in by])
        names = [(str(part["model"].iloc[0]), str(part["checkpoint"].iloc[0])) for part in parts]
        sign = -1 if self.higher_is_better else 1

        def pick(values: np.ndarray) -> int:
            return self._order((sign * values).tolist(), names)[0]

        figure, part = reported[pick(values)]
        if len(parts) == 1:
            return figure.estimate(PairArrays(part).clusters)
        measured, choosing = ([contributions(f, p["cluster"]) for f, p in each] for each in (reported, by))
        return without_luck((figure, part["cluster"].to_numpy()), measured, pick, choosing)

    def require(self, rows: Sequence[Row]) -> None:
        """Check that one of the rows can be chosen, unless none has figures."""
        measured = [row for row in rows if not row["error"]]
        if not measured or self.ranked(rows):
            return
        for name, row in self._by_set(measured[0]).items():
            try:
                figure_of(self._figures(row), self.metric)
            except ConfigError as error:
                where = f"on {name} {error}; metric_for_best SET:FIGURE chooses by one set" if name else str(error)
                raise ConfigError(where) from None

    def _by_set(self, row: Any) -> dict[str | None, Row]:
        return {name: row["sets"][name] for name in self.sets} or {None: row}

    def _figures(self, row: Row) -> Mapping[str, Any]:
        """Return the row's figures of the metric's kind, by name."""
        if self.metric.startswith(CATEGORY):
            categories = row["statistics"]["category"]
            return {f"{CATEGORY}{name}": figures["preference_accuracy"] for name, figures in categories.items()}
        if self.metric.startswith(BENCHMARK):
            return {f"{BENCHMARK}{name}": figure for name, figure in row.get("benchmark", {}).items()}
        outputs = row.get("outputs", {}).items()
        by_output = {f"{output}_{it}": of[it] for output, of in outputs for it in FIGURES if it in of}
        return {**by_output, **cast(Mapping[str, Any], row["statistics"]["overall"])}

    def number(self, row: Row, part: str) -> float:
        """Return `value`, `low`, `high` or `standard_error` of the row's figure, NaN where there is none."""
        figures = [self._figures(it).get(self.metric, math.nan) for it in self._by_set(row).values()]
        numbers = [
            float(figure[part]) if isinstance(figure, Mapping) else float(figure) if part == "value" else math.nan
            for figure in figures
        ]
        return float(np.linalg.norm(numbers) / len(numbers) if part == "standard_error" else np.mean(numbers))


def _figure(part: pd.DataFrame, name: str) -> tuple[Figure, pd.DataFrame] | None:
    """Return a figure of scored pairs, and the pairs that it is of; None where it has no value for each cluster."""
    if name.startswith(CATEGORY):
        part, name = part[part["category"] == name.removeprefix(CATEGORY)], "preference_accuracy"
    computed = METRICS[name].compute(PairArrays(part)) if name in METRICS and len(part) else None
    return (computed, part) if isinstance(computed, Figure) and np.isfinite(computed.influence().value) else None


# The figure of the best of several checkpoints without the luck of being chosen: the best of many equal checkpoints is
# the one that chance helped most, and its figure on the pairs that chose it is too high. Clusters are drawn with
# replacement; in each draw the choice is made anew, and the chosen one is measured on the clusters that were not drawn
# (Tsamardinos, Greasidou and Borboudakis, Bootstrapping the out-of-sample predictions, 2018). Since a draw holds fewer
# clusters, the mean over draws is a little below the truth where checkpoints do differ.


def contributions(figure: Figure, clusters: Sequence | np.ndarray) -> pd.Series:
    """Return what each cluster adds: values whose mean is the figure, to first order those of leaving one out."""
    influence = figure.influence()
    codes, names = pd.factorize(np.asarray(clusters, dtype=object))
    by_cluster = np.bincount(codes, influence.rows, len(names))
    counted = np.bincount(codes, influence.shares, len(names)) > 0
    return pd.Series(influence.value + counted.sum() * by_cluster[counted], index=names[counted])


def without_luck(
    chosen: tuple[Figure, np.ndarray],
    measured: Sequence[pd.Series],
    choose: Callable[[np.ndarray], int],
    by: Sequence[pd.Series] | None = None,
) -> Estimate | None:
    """Return the figure of the chosen one of M checkpoints without the luck of the choice.

    `chosen` is its figure and its rows' clusters. `measured` are the `contributions` of each checkpoint to the figure
    that is reported; `choose` returns the number of one for values [M] of that, or of the figure with those in `by`.
    """
    figure, clusters = chosen
    influence = figure.influence()
    of, count = spread(influence, numbered(clusters))
    reported, deciding = (pd.concat(list(columns), axis=1, join="inner") for columns in (measured, by or measured))
    shared = reported.index.intersection(deciding.index)
    if len(shared) < 2:
        return None
    values, choosing = reported.loc[shared].to_numpy(), deciding.loc[shared].to_numpy()
    size = len(shared)
    rng = np.random.default_rng(SEED)
    total, draws = np.zeros(size), np.zeros(size)
    step = max(CELLS // size, 1)
    for start in range(0, DRAWS, step):
        drawn = rng.integers(size, size=(min(step, DRAWS - start), size))
        times = np.stack([np.bincount(draw, minlength=size) for draw in drawn])
        picks = [choose(row) for row in times @ choosing / size]
        left_out = times == 0
        total += (left_out * values[:, picks].T).sum(axis=0)
        draws += left_out.sum(axis=0)
    value = float(np.mean(total[draws > 0] / draws[draws > 0]))
    return with_ends(influence._replace(value=value), of, count, figure.scale)
