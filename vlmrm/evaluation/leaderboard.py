"""`vlmrm leaderboard`: one table of models by data sets, from the results of any number of evaluations."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

import vlmrm
from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.public import BENCHMARKS, benchmark
from vlmrm.evaluation.results import digest
from vlmrm.evaluation.schema import ResultsFile, Row, details_path, load_results
from vlmrm.files import make_folder, require_own_file, write_file
from vlmrm.measures.differences import compare
from vlmrm.measures.pairs import read_pairs
from vlmrm.measures.plots import css_variables

PAGE, TABLE, GENERATOR = "leaderboard.html", "leaderboard.csv", "vlmrm leaderboard"
ACCURACY = "preference_accuracy"
# Keys of the data that say which rows are scored, and what their columns mean.
SELECTING = (
    *("dataset_split", "dataset_weights", "eval_fraction", "split_seed", "max_eval_samples", "columns", "images"),
)


class SetFigure(NamedTuple):
    """A model's figure on a set with the ends of its 95 % interval, NaN where they are not known, and its pairs."""

    value: float
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0


class Measured(NamedTuple):
    """A row of results with its scored pairs."""

    row: Row
    pairs: pd.DataFrame


@dataclass
class DataSet:
    """A column of the leaderboard: a data set with what was measured on it, by model."""

    name: str
    benchmark: str | None
    measured: dict[str, Measured] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """Return the figure that stands for the set: of a benchmark the first that others published."""
        published = benchmark(self.benchmark).published_figures if self.benchmark in BENCHMARKS else []
        return next((it.metric for it in published), ACCURACY)

    @property
    def pairs(self) -> int:
        return max(len(measured.pairs) for measured in self.measured.values())

    def figure(self, model: str, metric: str | None = None) -> SetFigure | None:
        """Return the model's figure; None where it was not measured, or lacks what the benchmark's rule needs."""
        if model not in self.measured:
            return None
        row, pairs = self.measured[model]
        figures: Any = row["statistics"]["overall"] | row.get("benchmark", {})
        found = figures.get(metric or self.metric)
        if found is None or found["value"] is None:
            return None
        return SetFigure(found["value"], found["low"], found["high"], len(pairs))


class Line(NamedTuple):
    """A model with its figure on each set, None where it has none.

    `mean` is that of its accuracies, and `ranks` the best and the worst rank that the data leave open. A model that
    lacks a set has neither.
    """

    model: str
    figures: list[SetFigure | None]
    mean: SetFigure | None
    ranks: tuple[int, int] | None


class Leaderboard(NamedTuple):
    """The sets, the models, the best first and then those without a rank, and what a reader has to know."""

    sets: list[DataSet]
    lines: list[Line]
    notes: list[str]

    def table(self) -> pd.DataFrame:
        """Return a row for each model: ranks, mean, and each set with its interval and pairs."""
        rows = []
        for line in self.lines:
            best, worst = line.ranks or (None, None)
            row: dict[str, Any] = {"model": line.model, "best_rank": best, "worst_rank": worst}
            cells = [("mean", line.mean), *zip((it.name for it in self.sets), line.figures, strict=True)]
            for name, figure in cells:
                names = (name, f"{name}/low", f"{name}/high", f"{name}/pairs")
                row |= dict(zip(names, figure or (None,) * 4, strict=True))
            rows.append(row)
        return pd.DataFrame(rows)


def build_leaderboard(
    sources: Sequence[str | Path], output_dir: str | Path, *, title: str = "Leaderboard", best_only: bool = False
) -> Path:
    """Write leaderboard.html and leaderboard.csv to `output_dir`, and return the page's path.

    Raises:
        ConfigError: when results are missing or of another version, or `output_dir` holds other files of these names.
        DataError: when scored pairs cannot be read, or there are no figures.
    """
    board = leaderboard(sources, best_only=best_only)
    folder = Path(output_dir)
    make_folder(folder)
    require_own_file(folder / PAGE, f'content="{GENERATOR}"')
    require_own_file(folder / TABLE, "model,best_rank")
    write_file(folder / TABLE, board.table().to_csv(index=False))
    write_file(folder / PAGE, page(board, title))
    return folder / PAGE


def leaderboard(sources: Sequence[str | Path], *, best_only: bool = False) -> Leaderboard:
    """Return the leaderboard of results.

    Args:
        sources: for each evaluation the output_file, a file beside it, or a folder of them.
        best_only: take of each evaluation only the checkpoint that it chose as the best.

    Raises:
        ConfigError, DataError: as `build_leaderboard`.
    """
    files = list(dict.fromkeys(path for source in sources for path in _files(Path(source))))
    if not files:
        raise ConfigError("there is nothing to rank: name the output_file of at least one evaluation.")
    sets: dict[str, DataSet] = {}
    notes: list[str] = []
    for file in files:
        _add(load_results(file), file, sets, notes, best_only)
    columns = [it for it in sets.values() if it.measured]
    if not columns:
        raise DataError("there is nothing to rank: no row of the results has figures.")
    models = list(dict.fromkeys(model for column in columns for model in column.measured))
    whole = [model for model in models if all(model in column.measured for column in columns)]
    ranks = _ranks(columns, whole)
    means = {model: _mean(columns, model) for model in whole}
    lines = [Line(model, [it.figure(model) for it in columns], means.get(model), ranks.get(model)) for model in models]
    lines.sort(key=lambda line: (line.ranks is None, -(line.mean.value if line.mean else 0), line.model))
    return Leaderboard(columns, lines, notes)


def _files(source: Path) -> list[Path]:
    """Return the .json of each result behind a path; the table of a suite stands for the folder of that name."""
    if not source.is_dir():
        if details_path(source).is_file() or not source.with_suffix("").is_dir():
            return [details_path(source)]
        source = source.with_suffix("")
    found = [beside for path in sorted(source.glob("*.scores.parquet")) if (beside := details_path(path)).is_file()]
    if not found:
        raise ConfigError(f"{source} holds no results: name the folder of a suite, or an output_file.")
    return found


def _add(results: ResultsFile, file: Path, sets: dict[str, DataSet], notes: list[str], best_only: bool) -> None:
    """Add the rows of a results file to the set that they are of; of two of one model the newest counts."""
    settings, scores = results["settings"], file.with_suffix(".scores.parquet")
    rows = [row for row in results["results"] if not row["error"]]
    if best_only and results["best"]:
        rows = [row for row in rows if row["path"] == results["best"]["path"]]
    if not rows:
        notes.append(f"{file} has no figures: every row of it failed.")
        return
    reading = settings.get("reading", {})
    public = settings.get("benchmark")
    key = digest([settings["data"], public, [reading.get(name) for name in SELECTING]])
    if key not in sets:
        paths = " + ".join(Path(path).stem or path for path in reading.get("dataset_path", []))
        name = results.get("set_name") or public or paths or file.stem
        alike = sum(re.fullmatch(rf"{re.escape(name)}( \(\d+\))?", it.name) is not None for it in sets.values())
        if alike:
            notes.append(f"{file} is of other data than the other results of {name}, and has a column of its own.")
        sets[key] = DataSet(f"{name} ({alike + 1})" if alike else name, public)
    parts = dict([*read_pairs(scores).groupby(["model", "checkpoint"], sort=False)])
    for row in rows:
        pairs = parts.get((row["model"], row["checkpoint"]))
        if pairs is None:
            raise DataError(f"{scores} lacks the pairs of {row['path']}: evaluate it again.")
        earlier = sets[key].measured.get(row["path"])
        if earlier is not None:
            dates = sorted([earlier.row["provenance"]["date"], row["provenance"]["date"]])
            notes.append(f"{row['path']} was measured twice on {sets[key].name}: the figures of {dates[1]} are taken.")
            if row["provenance"]["date"] != dates[1]:
                continue
        sets[key].measured[row["path"]] = Measured(row, pairs)


def _mean(sets: Sequence[DataSet], model: str) -> SetFigure:
    """Return the mean accuracy over sets, which count the same; its interval is that of independent figures."""
    figures = [figure for it in sets if (figure := it.figure(model, ACCURACY))]
    value = float(np.mean([it.value for it in figures]))
    below, above = (math.hypot(*(getattr(it, end) - it.value for it in figures)) for end in ("low", "high"))
    count = len(figures)
    return SetFigure(value, value - below / count, value + above / count, sum(it.pairs for it in figures))


def _ranks(sets: Sequence[DataSet], models: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the best and the worst rank of each model that the data leave open.

    One is ahead of another where the mean of their differences lies above zero by more than the half widths of the
    intervals of `compare`, which hold together with 95 %.
    """
    ahead: dict[str, int] = dict.fromkeys(models, 0)
    behind = dict(ahead)
    tests = [compare({model: it.measured[model].pairs for model in models}) for it in sets]
    for of_couple in zip(*tests, strict=True):
        mean = np.mean([test.difference.value for test in of_couple])
        halves = [(test.difference.high - test.difference.low) / 2 for test in of_couple]
        if abs(mean) > np.linalg.norm(halves) / len(halves):
            first, second = of_couple[0].first, of_couple[0].second
            winner, loser = (first, second) if mean > 0 else (second, first)
            ahead[loser] += 1
            behind[winner] += 1
    return {model: (1 + ahead[model], len(models) - behind[model]) for model in models if len(models) > 1}


def page(board: Leaderboard, title: str) -> str:
    """Return the page, which opens offline: its style and its script are in it, and no other script may run."""
    loader = PackageLoader("vlmrm.evaluation", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = loader.get_source(environment, "leaderboard.js.jinja")[0]
    return environment.get_template("leaderboard.html.jinja").render(
        title=title,
        board=board,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        version=vlmrm.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        isnan=math.isnan,
        generator=GENERATOR,
    )
