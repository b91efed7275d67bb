"""`vlmrm leaderboard`: one table of models by data sets, from the results of any number of evaluations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import vlmrm
from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.public import BENCHMARKS, benchmark
from vlmrm.evaluation.report import digest_of, now, templates
from vlmrm.evaluation.results import digest
from vlmrm.evaluation.schema import ResultsFile, Row, details_path, load_results
from vlmrm.files import make_folder, require_own_file, write_file
from vlmrm.measures.analysis import Finding, deciding
from vlmrm.measures.differences import compare
from vlmrm.measures.pairs import read_pairs
from vlmrm.measures.plots import css_variables

PAGE, TABLE, GENERATOR = "leaderboard.html", "leaderboard.csv", "vlmrm leaderboard"
ACCURACY = "preference_accuracy"
# Keys of the data that say which rows are scored, and what their columns mean.
SELECTS = ["dataset_split", "dataset_weights", "eval_fraction", "split_seed", "max_eval_samples", "columns", "images"]


class SetFigure(NamedTuple):
    """A model's figure on a set with the ends of its 95 % interval, NaN where they are not known, and its pairs."""

    value: float
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0


@dataclass
class DataSet:
    """A column of the leaderboard: a data set with the row of results and the scored pairs of each model."""

    name: str
    benchmark: str | None
    measured: dict[str, tuple[Row, pd.DataFrame]] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """Return the figure that stands for the set: of a benchmark the first that others published."""
        published = benchmark(self.benchmark).published_figures if self.benchmark in BENCHMARKS else []
        return next((it.metric for it in published), ACCURACY)

    @property
    def pairs(self) -> int:
        return max(len(pairs) for _, pairs in self.measured.values())

    def figure(self, model: str, metric: str | None = None) -> SetFigure | None:
        """Return the model's figure; None where it was not measured, or lacks what the benchmark's rule needs."""
        if model not in self.measured:
            return None
        row, pairs = self.measured[model]
        figures: Any = row["statistics"]["overall"] | row.get("benchmark", {})
        found = figures.get(metric or self.metric)
        return None if found is None else SetFigure(found["value"], found["low"], found["high"], len(pairs))

    def is_blind(self, model: str) -> bool:
        """Return whether the audit found that the model does not look at the images."""
        audit = self.measured[model][0]["statistics"].get("audit", []) if model in self.measured else []
        finding = deciding([Finding(**found) for found in audit], "image")
        return finding is not None and finding.state == "not reliant"


class Line(NamedTuple):
    """A model with its figures by set; one that has all also has their mean, and its best and its worst rank."""

    model: str
    figures: list[SetFigure | None]
    mean: SetFigure | None
    ranks: tuple[int, int] | None
    blind: list[str]  # the sets on which it is shown to lose nothing with another row's image


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
            row["blind"] = "; ".join(line.blind)
            cells = [("mean", line.mean), *zip((it.name for it in self.sets), line.figures, strict=True)]
            for name, figure in cells:
                names = (name, f"{name}/low", f"{name}/high", f"{name}/pairs")
                row |= dict(zip(names, figure or (None,) * 4, strict=True))
            rows.append(row)
        return pd.DataFrame(rows)


def build_leaderboard(
    sources: Sequence[str | Path], output_dir: str | Path, *, title: str = "Leaderboard", best_only: bool = False
) -> Path:
    """Write leaderboard.html and leaderboard.csv to `output_dir`, and return the page's path."""
    board = leaderboard(sources, best_only=best_only)
    folder = Path(output_dir)
    make_folder(folder)
    require_own_file(folder / PAGE, f'content="{GENERATOR}"')
    require_own_file(folder / TABLE, "model,best_rank")
    write_file(folder / TABLE, board.table().to_csv(index=False))
    write_file(folder / PAGE, page(board, title))
    return folder / PAGE


def leaderboard(sources: Sequence[str | Path], *, best_only: bool = False) -> Leaderboard:
    """Return the leaderboard of results, by output_file, a file beside it, or a folder of them.

    With `best_only`, only the checkpoint counts that each evaluation chose as the best.
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
    ranks, means = _ranks(columns, whole), {model: _mean(columns, model) for model in whole}
    blind = {model: [it.name for it in columns if it.is_blind(model)] for model in models}
    lines = [
        Line(model, [it.figure(model) for it in columns], means.get(model), ranks.get(model), blind[model])
        for model in models
    ]
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
    key = digest([settings["data"], public, [reading.get(name) for name in SELECTS]])
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
        earlier, _ = sets[key].measured.get(row["path"], (row, pairs))
        newest = max(earlier, row, key=lambda it: it["provenance"]["date"])
        if earlier is not row:
            date = newest["provenance"]["date"]
            notes.append(f"{row['path']} was measured twice on {sets[key].name}: the figures of {date} are taken.")
        if newest is row:
            sets[key].measured[row["path"]] = row, pairs


def _mean(sets: Sequence[DataSet], model: str) -> SetFigure:
    """Return the mean accuracy over sets, which count the same; its interval is that of independent figures."""
    figures = [figure for it in sets if (figure := it.figure(model, ACCURACY))]
    value = float(np.mean([it.value for it in figures]))
    below, above = (math.hypot(*(getattr(it, end) - it.value for it in figures)) for end in ("low", "high"))
    count = len(figures)
    return SetFigure(value, value - below / count, value + above / count, sum(it.pairs for it in figures))


def _ranks(sets: Sequence[DataSet], models: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the best and the worst rank of each model that the data leave open.

    One is ahead of another where the mean of their differences is larger than the half widths of the intervals.
    """
    ahead: dict[str, int] = dict.fromkeys(models, 0)
    behind = dict(ahead)
    tests = [compare({model: it.measured[model][1] for model in models}) for it in sets]
    for of_couple in zip(*tests, strict=True):
        mean = np.mean([test.difference.value for test in of_couple])
        halves = [(test.difference.high - test.difference.low) / 2 for test in of_couple]
        if abs(mean) > np.linalg.norm(halves) / len(halves):
            winner, loser = of_couple[0][:2] if mean > 0 else of_couple[0][1::-1]
            ahead[loser] += 1
            behind[winner] += 1
    return {model: (1 + ahead[model], len(models) - behind[model]) for model in models if len(models) > 1}


def page(board: Leaderboard, title: str) -> str:
    """Return the page, which opens offline: its style and its script are in it, and no other script may run."""
    script = Path(__file__).with_name("leaderboard.js.jinja").read_text(encoding="utf-8")
    return (
        templates()
        .get_template("leaderboard.html.jinja")
        .render(
            title=title,
            board=board,
            script=script,
            script_hash=digest_of(script),
            light=css_variables(dark=False),
            dark=css_variables(dark=True),
            version=vlmrm.__version__,
            date=now(),
            isnan=math.isnan,
            generator=GENERATOR,
        )
    )
