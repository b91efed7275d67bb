"""The results of several data sets together: a row for each checkpoint, its figure on each set, and their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd

from vlmrm.errors import ConfigError
from vlmrm.evaluation.choosing import MEAN, Criterion, split_metric
from vlmrm.evaluation.results import Results, digest
from vlmrm.evaluation.schema import Best, Row
from vlmrm.files import write_file


class SuiteRow(TypedDict):
    """A checkpoint with its row on each set by name; its `error` are those of all sets."""

    model: str
    checkpoint: str
    path: str
    error: str | None
    seconds: float
    sets: dict[str, Row]


@dataclass(frozen=True)
class MeanCriterion(Criterion):
    """A criterion that compares the mean of a figure over `sets`, which all count the same, by rows of a suite.

    The sets have no prompts in common, so that the error of the mean is that of independent figures.
    """

    sets: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return (
            f"{self.sets[0]}:{self.metric}" if len(self.sets) == 1 else f"{MEAN}{self.metric} of {len(self.sets)} sets"
        )

    def value(self, row: Any) -> float:
        return float(np.mean([self._value_on(name, row) for name in self.sets]))

    def _value_on(self, name: str, row: Any) -> float:
        try:
            return super().value(row["sets"][name])
        except ConfigError as error:
            raise ConfigError(f"on {name} {error}; metric_for_best SET:FIGURE chooses by one set") from None

    def number(self, row: Any, part: str) -> float:
        numbers = [super(MeanCriterion, self).number(row["sets"][name], part) for name in self.sets]
        return float(np.linalg.norm(numbers) / len(numbers) if part == "standard_error" else np.mean(numbers))


@dataclass
class SuiteTable:
    """The results of sets by name, with a table of all of them in `csv`."""

    csv: Path
    sets: Mapping[str, Results]
    criterion: MeanCriterion
    best: Best | None = field(default=None)

    @property
    def rows(self) -> list[Any]:
        """Return a `SuiteRow` for each checkpoint, in the order of evaluation."""
        by_path: dict[str, dict[str, Row]] = {}
        for name, results in self.sets.items():
            for row in results.rows:
                by_path.setdefault(row["path"], {})[name] = row
        return [self._row(rows) for rows in by_path.values()]

    def _row(self, rows: Mapping[str, Row]) -> SuiteRow:
        first = next(iter(rows.values()))
        errors = {name: rows[name]["error"] if name in rows else "not evaluated" for name in self.sets}
        return {
            "model": first["model"],
            "checkpoint": first["checkpoint"],
            "path": first["path"],
            "error": "; ".join(f"{name}: {error}" for name, error in errors.items() if error) or None,
            "seconds": sum(row["seconds"] for row in rows.values()),
            "sets": dict(rows),
        }

    @property
    def figure(self) -> Criterion:
        """Return the criterion of one set."""
        return Criterion(self.criterion.metric, self.criterion.one_standard_error)

    @property
    def data(self) -> str:
        """Return a fingerprint of the data of all sets."""
        return digest([results.data for results in self.sets.values()])

    def scores_of(self, best: Best) -> np.ndarray:
        """Return the scores of all branches of all sets by a checkpoint."""
        return np.concatenate([results.scores_of(best) for results in self.sets.values()])

    def write_tables(self) -> None:
        """Write the tables of the sets, of which each names the best of all sets as its best, and that of all."""
        for results in self.sets.values():
            results.best = self.best or results.best
            results.write_tables()
        write_file(self.csv, self.table().to_csv(index=False))

    def table(self) -> pd.DataFrame:
        """Return a row for each checkpoint: the figure of `metric_for_best` on each set with its interval."""
        lines = []
        for row in self.rows:
            line: dict[str, Any] = {"model": row["model"], "checkpoint": row["checkpoint"]}
            line[self.criterion.label] = math.nan if row["error"] else self.criterion.number(row, "value")
            for name in self.sets:
                measured = row["sets"].get(name)
                for column, part in ((name, "value"), (f"{name}/low", "low"), (f"{name}/high", "high")):
                    has = measured is not None and not measured["error"]
                    line[column] = self.figure.number(measured, part) if has else math.nan
            line |= {"error": row["error"], "seconds": row["seconds"]}
            line["best"] = self.best is not None and row["path"] == self.best["path"]
            lines.append(line)
        return pd.DataFrame(lines)


def mean_criterion(metric: str, one_standard_error: bool, names: tuple[str, ...]) -> MeanCriterion:
    """Return the criterion of `metric_for_best` over the sets of these names: the mean, or SET:FIGURE."""
    name, figure = split_metric(metric)
    return MeanCriterion(figure, one_standard_error, sets=names if name is None else (name,))
