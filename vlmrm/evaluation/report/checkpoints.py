"""The checkpoints of a report: their scored pairs, the results of their sweeps, and the format of numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.choosing import MEAN, Criterion, split_metric
from vlmrm.evaluation.schema import Best, ResultsFile, Row, details_path, load_results
from vlmrm.measures.analysis import GROUP, Finding, analyse, audit, figures
from vlmrm.measures.differences import PairedTest, compare
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.pairs import COLUMNS, margins_of, not_finite, read_pairs
from vlmrm.outputs import ONE, Outputs

CATEGORY = "category"
NEEDED = ("model", "checkpoint", *COLUMNS)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its scored pairs: all in `rows`, those with a preference in `pairs`."""

    model: str
    name: str
    label: str
    rows: pd.DataFrame

    @cached_property
    def pairs(self) -> pd.DataFrame:
        return self.rows[~self.rows["tie"].to_numpy(dtype=bool)]

    @cached_property
    def margins(self) -> np.ndarray:
        return margins_of(self.pairs)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return `vlmrm.measures.analysis.figures` of all its pairs."""
        return figures(self.rows)

    @cached_property
    def groups(self) -> dict[str, Any]:
        """Return `figures` by category and by each column of `group_by`."""
        return analyse(self.rows)

    @cached_property
    def audit(self) -> list[Finding]:
        """Return what its preference rests on."""
        return audit(self.rows)

    @property
    def accuracy(self) -> Estimate:
        return self.share("preference_accuracy")

    def altered(self, intervention: str) -> Estimate:
        """Return accuracy under the intervention; n is 0 where it was not scored."""
        return self.share(f"{intervention}_accuracy")

    def shares(self, column: str) -> dict[str, Estimate]:
        """Return the accuracy by value of CATEGORY or a column by/NAME, of values with a pair that is no tie."""
        by = self.groups["by"]
        groups = by.get(column.removeprefix(GROUP), {}) if column.startswith(GROUP) else self.groups["category"]
        shares = {value: Estimate(**group["preference_accuracy"]) for value, group in groups.items()}
        return {value: share for value, share in shares.items() if share.n}

    def share(self, name: str) -> Estimate:
        """Return one of the estimates of `figures`."""
        return Estimate(**self.figures[name])

    @property
    def step(self) -> float:
        return float(self.rows["step"].iloc[0]) if "step" in self.rows else float("nan")


def read_frames(sources: Sequence[pd.DataFrame | str | Path]) -> list[pd.DataFrame]:
    """Return the frames, and for each path that of the `.scores.parquet` that it names or is beside it.

    Results of outputs that were measured without pairs have none.
    """
    if not sources:
        raise ConfigError("there is nothing to report: name the output_file of at least one evaluation.")
    frames = [source if isinstance(source, pd.DataFrame) else _read(Path(source)) for source in sources]
    return [frame for frame in frames if frame is not None]


def scores_path(path: Path) -> Path:
    """Return the path of the scored pairs: `path` itself, or the file beside a table or its details."""
    if path.suffix not in (".csv", ".json", ".parquet"):
        raise ConfigError(f"{path} is no file of an evaluation: give its .csv, .json or .scores.parquet.")
    return path if path.suffix == ".parquet" else path.with_suffix(".scores.parquet")


def _read(path: Path) -> pd.DataFrame | None:
    file = scores_path(path)
    if not file.is_file():
        if any(sweep["best"] and "outputs" in row for sweep in read_sweeps([path]) for row in sweep["results"]):
            return None
        if sets := sorted(path.with_suffix("").glob("*.scores.parquet")):
            raise ConfigError(
                f"{path} is the table of {len(sets)} data sets: give one of them, such as {sets[0]}, or rank the "
                f"models with vlmrm leaderboard {path.with_suffix('')}."
            )
        raise ConfigError(f"there is no {file}: give the output_file of an evaluation, or its .scores.parquet.")
    return read_pairs(file)


def split(frames: Sequence[pd.DataFrame]) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints of all frames, by model and step, and a sentence about each that cannot be shown."""
    rows_by_key: dict[tuple[str, str], pd.DataFrame] = {}
    if not frames:
        return [], []
    for frame in frames:
        if missing := [name for name in NEEDED if name not in frame]:
            raise DataError(f"the scored pairs have no column {', '.join(missing)}: make them with vlmrm eval.")
        for (model, name), rows in frame.groupby(["model", "checkpoint"], sort=False):  # ty: ignore[not-iterable]
            key = (str(model), str(name))
            if key in rows_by_key:
                raise ConfigError(
                    f"{model}/{name} is in two of the results: give each checkpoint once, or show "
                    "what it has on several data sets with vlmrm leaderboard."
                )
            rows_by_key[key] = rows
    labels = _labels(list(rows_by_key))
    checkpoints, left_out = [], []
    for key, rows in rows_by_key.items():
        checkpoint = Checkpoint(*key, labels[key], rows)
        if (bad := not_finite(rows)).any():
            left_out.append(f"{labels[key]} is left out: {int(bad.sum()):,} of its pairs have no finite score.")
        elif not len(checkpoint.pairs):
            left_out.append(f"{labels[key]} is left out: it has no pair with a preference.")
        else:
            checkpoints.append(checkpoint)
    if not checkpoints:
        raise DataError(f"there is nothing to report: {' '.join(left_out) or 'the results hold no scored pair.'}")
    models = list(dict.fromkeys(checkpoint.model for checkpoint in checkpoints))
    checkpoints.sort(key=lambda c: (models.index(c.model), np.inf if np.isnan(c.step) else c.step))
    return checkpoints, left_out


def _labels(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the shortest unambiguous names: with several models, the last folder of each before the checkpoint."""
    models = {model for model, _ in keys}
    short = {model: Path(model).name or model for model in models}
    if len(set(short.values())) < len(models):
        short = {model: model for model in models}
    return {(model, name): name if len(models) == 1 else f"{short[model]}/{name}" for model, name in keys}


@dataclass(frozen=True)
class Choice:
    """The checkpoint that the report is about, and the reason in words."""

    best: Checkpoint
    reason: str
    path: str
    accuracy: Estimate  # or another `metric`, without the luck of being chosen among so many as `among`
    leakage: dict[str, Any] | None  # the overlap of its data with the training data, None if unknown
    benchmark: tuple[str, Mapping[str, Mapping[str, Any]]] | None  # a public one's name and its figures
    among: int = 1  # also where the luck is unknown
    limits: Mapping[str, str] = field(default_factory=dict)  # interventions that could not be tried, with the reason
    behind: Mapping[str, PairedTest] = field(default_factory=dict)  # the best against each other, by its label
    unlike: str = ""  # why they cannot be compared
    metric: str = "accuracy"
    rows: Sequence[Row] = ()  # its own of the results and, where there are no pairs, the others'
    outputs: Outputs = ONE


def read_sweeps(sources: Sequence[pd.DataFrame | str | Path]) -> list[ResultsFile]:
    """Return the results (.json) beside the paths that have them; frames, and pairs without a sweep, have none."""
    pairs = [scores_path(Path(source)) for source in sources if not isinstance(source, pd.DataFrame)]
    return [load_results(path) for path in map(details_path, pairs) if path.is_file()]


def without_figures(sweeps: Sequence[ResultsFile]) -> list[str]:
    """Return a sentence about each row of the results that has an error in place of figures."""
    rows = (row for sweep in sweeps for row in sweep["results"] if row["error"])
    return [f"{row['path']} has no figures: {row['error']}" for row in rows]


def choose(checkpoints: Sequence[Checkpoint], sweeps: Sequence[ResultsFile]) -> Choice:
    """Return the choice of the sweep; among those of several sweeps, or without any, the most accurate."""
    if not checkpoints:
        if len(sweeps) > 1 or (first := sweeps[0]["best"]) is None:
            raise DataError("results without pairs are shown one at a time: name those of one evaluation.")
        rows = sorted(
            (it for it in sweeps[0]["results"] if not it["error"]), key=lambda it: it["path"] != first["path"]
        )
        reason = f"Best of {len(rows)} by {first['metric'].replace('_', ' ')}" if len(rows) > 1 else ""
        alone = Checkpoint(first["model"], first["checkpoint"], first["checkpoint"], pd.DataFrame())
        figure = Estimate(first["value"], *[math.nan] * 3, 0, 0)
        choice = Choice(alone, reason, first["path"], figure, sweeps[0]["leakage"], None, unlike=reason)
        return replace(choice, metric=first["metric"], rows=rows, outputs=_outputs_of(sweeps[0]))
    chosen = {(best["model"], best["checkpoint"]): best for sweep in sweeps if (best := sweep["best"])}
    named = [checkpoint for checkpoint in checkpoints if (checkpoint.model, checkpoint.name) in chosen]
    best = max(named or checkpoints, key=lambda checkpoint: checkpoint.accuracy.value)  # of equals the first
    name = (best.model, best.name)
    criterion, reason = _criterion(chosen.get(name), {sweep.get("set_name") for sweep in sweeps})
    if len(named) > 1:
        reason = f"the most accurate of {len(named)} that are {reason} in their results"
    rows = [checkpoint.rows for checkpoint in checkpoints]
    honest = None if criterion is None else criterion.without_luck(rows, "preference_accuracy")
    accuracy, among = (best.accuracy, 1) if honest is None else (honest, len(checkpoints))
    choice = Choice(best, reason, "/".join(name), accuracy, None, None, among, {}, *_compared(best, checkpoints))
    held = [(sweep, row) for sweep in sweeps for row in sweep["results"] if (row["model"], row["checkpoint"]) == name]
    if not held:
        return choice
    sweep, row = held[0]
    benchmark = (sweep["settings"]["benchmark"], row["benchmark"]) if "benchmark" in row else None
    known = {"leakage": sweep["leakage"], "benchmark": benchmark, "limits": row.get("limits", {})}
    return replace(choice, path=row["path"], rows=[row], outputs=_outputs_of(sweep), **known)


def _outputs_of(sweep: ResultsFile) -> Outputs:
    return Outputs.of(sweep["settings"].get("reading", {}).get("outputs"))


def _compared(best: Checkpoint, checkpoints: Sequence[Checkpoint]) -> tuple[Mapping[str, PairedTest], str]:
    """Return the test of the best against each other checkpoint by label, or why there is none."""
    others = [checkpoint for checkpoint in checkpoints if checkpoint is not best]
    try:
        tests = compare({checkpoint.label: checkpoint.rows for checkpoint in (best, *others)})
    except DataError as error:
        return {}, str(error)
    return {test.second: test for test in tests[: len(others)]}, ""


def _criterion(best: Best | None, sets: Collection[str | None]) -> tuple[Criterion | None, str]:
    """Return the criterion by which a checkpoint was chosen, and the reason in words.

    None where other sets than these chose it, whose luck is not in these figures.
    """
    if best is None:
        return Criterion(), "best by preference accuracy"
    named, figure = split_metric(best["metric"])
    chosen_here = named in sets if named is not None else not best["metric"].startswith(MEAN)
    reason = f"best by {best['metric'].replace('_', ' ')}"
    return Criterion(figure) if chosen_here else None, reason


def percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"


def interval(share: Estimate) -> str:
    return "–" if np.isnan(share.low) else f"{share.low:.1%} to {share.high:.1%}"


def points(value: float) -> str:
    return number(100 * value, 1)


def number(value: float, digits: int = 3) -> str:
    """Write a number with a true minus, and none before zero; NaN as a dash."""
    if np.isnan(value):
        return "–"
    text = f"{abs(value):.{digits}f}"
    return f"−{text}" if value < 0 and float(text) else text
