"""Results of several runs as one: which are of the same data, and which rows are of the same model.

Results are of the same data when no pair in both has other answers or another verdict, and they either were read from
the same files with the same keys, or have the same name and nearly all pairs in common.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pandas.util import hash_pandas_object

from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.public import BENCHMARKS, Published, benchmark
from vlmrm.evaluation.results import digest
from vlmrm.evaluation.schema import ResultsFile, Row, load_results
from vlmrm.measures.pairs import COLUMNS, credits_of, margins_of, not_finite, read_pairs

NEEDED = ("model", "checkpoint", *COLUMNS)
SAME = 0.99  # of the pairs of two results, to be taken for the same data by their name
# Keys of the data that say which rows are scored, and what their columns mean.
SELECTING = (
    *("dataset_split", "dataset_weights", "eval_fraction", "split_seed", "max_eval_samples", "columns", "images"),
)
SCORER = re.compile(r"(hf|reward|judge|python|https?):")  # two functions of a module have one digest
PLACE = ["comparison_id", "prompt_id", "pair"]  # of a pair in the data, whatever people said of it
VERDICT = ["chosen_branch", "rejected_branch", "tie"]
TEXTS = ["prompt_text", "chosen_text", "rejected_text"]
ACCURACY = "preference_accuracy"
CHECKPOINT = re.compile(r"checkpoint-\d+|best|final")  # names that say nothing without their folder


class SetFigure(NamedTuple):
    """A model's figure on a set with the ends of its 95 % interval, NaN where they are not known."""

    value: float
    low: float
    high: float
    pairs: int


class Measurement(NamedTuple):
    """A row of results, its scored pairs, and the file that it is from."""

    row: Row
    pairs: pd.DataFrame
    path: Path


@dataclass(frozen=True)
class Run:
    """The results of one run on one set, with its scored pairs and two more columns of them: see `with_keys`."""

    path: Path
    results: ResultsFile
    pairs: pd.DataFrame

    @property
    def benchmark(self) -> str | None:
        return self.results["settings"].get("benchmark")

    @property
    def name(self) -> str:
        """Return the name of the set: its own, that of the benchmark, or those of the data."""
        if name := self.results.get("set_name") or self.benchmark:
            return name
        reading = self.results["settings"].get("reading", {})
        names = " + ".join(Path(path).stem or path for path in reading.get("dataset_path", [])) or self.path.stem
        return f"{names}, held out" if reading.get("eval_fraction") else names

    @cached_property
    def selection(self) -> str:
        """Return a digest of what the rows were read from, and by which keys."""
        settings = self.results["settings"]
        reading = settings.get("reading", {})
        return digest([settings["data"], self.benchmark, [reading.get(key) for key in SELECTING]])

    def measurements(self) -> list[Measurement]:
        """Return the rows that have figures and scored pairs."""
        of_row = dict([*self.pairs.groupby(["model", "checkpoint"], sort=False)])
        return [
            Measurement(row, of_row[row["model"], row["checkpoint"]], self.path)
            for row in self.results["results"]
            if not row["error"] and (row["model"], row["checkpoint"]) in of_row
        ]


def read_runs(sources: Sequence[str | Path], *, best_only: bool = False) -> list[Run]:
    """Return the results behind paths: an output_file, a file beside it, or a folder of them.

    With `best_only` they have no rows but those that one of them has as its best.

    Raises:
        ConfigError: when there are none, or they are of another version.
        DataError: when scored pairs cannot be read.
    """
    details = [path for source in sources for path in _details(Path(source))]
    if not details:
        raise ConfigError("there is nothing to rank: name the output_file of at least one evaluation.")
    runs = [_read(path) for path in dict.fromkeys(details)]
    if best_only:
        chosen = {best["path"] for run in runs if (best := run.results["best"])}
        for run in runs:
            run.results["results"] = [row for row in run.results["results"] if row["path"] in chosen]
    return runs


def _details(source: Path) -> list[Path]:
    """Return the .json of each result behind a path; the table of a suite stands for the folder of that name."""
    if not source.is_dir() and not _beside(source).is_file() and source.with_suffix("").is_dir():
        source = source.with_suffix("")
    if source.is_dir():
        paths = sorted(path for path in source.glob("*.scores.parquet") if _beside(path).is_file())
        if not paths:
            raise ConfigError(
                f"{source} holds no results: name the folder of a suite, or the output_file of an evaluation."
            )
        return [_beside(path) for path in paths]
    return [_beside(source)]


def _beside(path: Path) -> Path:
    pairs = path.name.endswith(".scores.parquet")  # a name may have dots of its own
    return path.with_name(f"{path.name.removesuffix('.scores.parquet')}.json") if pairs else path.with_suffix(".json")


def _read(path: Path) -> Run:
    if not path.is_file():
        raise ConfigError(f"there is no {path}: give the output_file of an evaluation, with its files beside it.")
    results = load_results(path)
    scores = path.with_suffix(".scores.parquet")
    if not scores.is_file():
        if all(row["error"] for row in results["results"]):
            raise ConfigError(f"{path} has no figures, as every row of it failed: leave it out, or evaluate again.")
        raise ConfigError(f"there is no {scores}, the scored pairs of {path.name}: copy it there too.")
    pairs = read_pairs(scores)
    if missing := [name for name in NEEDED if name not in pairs]:
        raise DataError(f"{scores} has no column {', '.join(missing)}: evaluate again.")
    if not_finite(pairs).any():
        raise DataError(f"{scores} has scores that are no finite numbers: evaluate again, in float32 if need be.")
    return Run(path, results, with_keys(pairs))


def with_keys(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return scored pairs with numbers for each pair: `place`, and `key`, in which answers and verdict count too.

    A pair that the data repeat has others for each repetition.
    """
    place = _hash(pairs[PLACE])
    repetition = (
        pairs[["model", "checkpoint"]].assign(place=place).groupby(["model", "checkpoint", "place"]).cumcount()
    )
    place = _hash(pd.DataFrame({"place": place, "repetition": repetition}))
    content = _hash(pairs[[*VERDICT, *(name for name in TEXTS if name in pairs)]])
    return pairs.assign(place=place, key=_hash(pd.DataFrame({"place": place, "content": content})))


def _hash(frame: pd.DataFrame) -> pd.Series:
    return hash_pandas_object(frame, index=False)  # ty: ignore[not-callable]


@dataclass
class Column:
    """A data set on which models were measured: a column of the leaderboard.

    `measured` has a measurement by the key of its model; `places` the key of each pair at its place in the data.
    """

    name: str
    benchmark: str | None
    selection: str
    places: pd.Series
    measured: dict[str, Measurement] = field(default_factory=dict)

    @property
    def published(self) -> list[Published]:
        """Return what others published of the benchmark, if it is one of ours."""
        return benchmark(self.benchmark).published_figures if self.benchmark in BENCHMARKS else []

    @property
    def metric(self) -> str:
        """Return the name of the figure that stands for the set: of a benchmark the first that others published."""
        return next((it.metric for it in self.published), ACCURACY)

    def figure(self, model: str) -> SetFigure | None:
        """Return the model's figure; None where it was not measured, or lacks what the benchmark's rule needs."""
        if model not in self.measured:
            return None
        row: Any = self.measured[model].row
        overall = row["statistics"]["overall"]
        figures = overall if self.metric == ACCURACY else row.get("benchmark", {})
        figure = figures.get(self.metric, {"value": math.nan})
        if math.isnan(figure["value"]):
            return None
        return SetFigure(figure["value"], figure["low"], figure["high"], overall["sample_count"])

    @property
    def most_pairs(self) -> int:
        """Return the most pairs that a model has."""
        return max(measurement.row["statistics"]["overall"]["sample_count"] for measurement in self.measured.values())

    def credits(self) -> pd.DataFrame:
        """Return the credit of each model (columns) for each pair that people did not tie, with its `prompt_id`."""
        prompts = pd.concat(
            [measurement.pairs.set_index("key")["prompt_id"] for measurement in self.measured.values()]
        )
        credits = {
            model: pd.Series(credits_of(margins_of(measurement.pairs)), index=measurement.pairs["key"].to_numpy())
            for model, measurement in self.measured.items()
        }
        table = pd.DataFrame(credits).dropna(how="all")
        return table.assign(prompt_id=prompts[~prompts.index.duplicated()])


def evaluation_sets(runs: Sequence[Run]) -> tuple[list[Column], dict[str, str], list[str]]:
    """Return the sets, the label of each model by its key, and a sentence about everything that was not obvious."""
    sets: list[Column] = []
    labels: dict[str, str] = {}
    notes: list[str] = []
    for run in runs:
        column = _column_of(run, sets, notes)
        for measurement in run.measurements():
            key = model_key(measurement.row)
            path = measurement.row["path"]
            if labels.setdefault(key, path) != path:
                note = f"{labels[key]} and {path} are the same model, by their weights, and share a line."
                notes += [note] if note not in notes else []
            _add(column, key, measurement, notes)
    return [column for column in sets if column.measured], _shortest(labels), notes


def model_key(row: Row) -> str:
    """Return what identifies a row's model: its weights, wherever they lie; of a scorer also its name."""
    weights = row["provenance"]["weights"] or row["path"]
    return f"{row['path']} {weights}" if SCORER.match(row["path"]) else weights


def _add(column: Column, key: str, measurement: Measurement, notes: list[str]) -> None:
    """Add a measurement to its set; of two of the same model the newest counts."""
    earlier = column.measured.get(key)
    if earlier is not None:
        older, newer = sorted([earlier, measurement], key=lambda it: it.row["provenance"]["date"])
        path = measurement.row["path"]
        notes.append(
            f"{path} was measured on {column.name} in {older.path} and in {newer.path}: the figures "
            f"of {newer.path}, of {newer.row['provenance']['date']}, are taken."
        )
        measurement = newer
    column.measured[key] = measurement


def _column_of(run: Run, sets: list[Column], notes: list[str]) -> Column:
    """Return the set that the results are of, a new one where none of `sets` is of the same data."""
    places = run.pairs.drop_duplicates("place").set_index("place")["key"]
    for column in sets:
        shared = column.places.index.intersection(places.index)
        if not len(shared) or (column.places[shared] != places[shared]).any() or column.benchmark != run.benchmark:
            continue
        alike = len(shared) / max(len(column.places), len(places)) >= SAME
        if column.selection == run.selection or (alike and column.name == run.name):
            column.places = pd.concat([column.places, places[~places.index.isin(shared)]])
            return column
    taken = [column.name for column in sets]
    name = run.name
    if name in taken:
        first = sets[taken.index(name)]
        name = next(
            label
            for label in (f"{name} ({len(places):,} pairs)", *(f"{name} ({number})" for number in range(2, 1000)))
            if label not in taken
        )
        shared = first.places.index.intersection(places.index)
        changed = int((first.places[shared] != places[shared]).sum())
        notes.append(
            f"{run.path} is not of the same data as the other results of {run.name}, and has a column of its own: of "
            f"its {len(places):,} pairs {len(shared) - changed:,} are among their {len(first.places):,}"
            + (f", and {changed:,} more with other answers or another verdict." if changed else ".")
        )
    column = Column(name, run.benchmark, run.selection, places)
    sets.append(column)
    return column


def _shortest(paths: Mapping[str, str]) -> dict[str, str]:
    """Return each path by the parts that tell it from the others; scorers such as hf:ID keep their names."""
    parts = {
        key: [path] if SCORER.match(path) else [part for part in path.split("/") if part]
        for key, path in paths.items()
    }
    short: dict[str, str] = {}
    folders = [names for names in parts.values() if len(names) > 1]
    while len(folders) > 1 and all(len(names) > 1 for names in folders) and len({names[-1] for names in folders}) == 1:
        for names in folders:
            names.pop()
    different = len({tuple(names) for names in parts.values()})
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        short = {key: "/".join(names[-count:]) for key, names in parts.items()}
        if len(set(short.values())) == different and not any(map(CHECKPOINT.fullmatch, short.values())):
            break
    labels: dict[str, str] = {}
    for key, label in short.items():
        labels[key] = (
            label if label not in labels.values() else f"{label} [{key.rpartition(' ')[2][:6]}]"
        )  # other weights
    return labels
