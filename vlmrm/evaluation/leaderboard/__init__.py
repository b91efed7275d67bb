"""`vlmrm leaderboard`: models by benchmarks from the results of any number of runs, ranked over common prompts."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

import vlmrm
from vlmrm.errors import DataError
from vlmrm.evaluation.leaderboard.merging import Column, SetFigure, evaluation_sets, read_runs
from vlmrm.files import make_folder, require_own_file, write_file, write_json
from vlmrm.measures.plots import css_variables
from vlmrm.measures.strengths import Standing, connected, standings

PAGE, TABLE, DETAILS = "leaderboard.html", "leaderboard.csv", "leaderboard.json"
GENERATOR = "vlmrm leaderboard"
SCHEMA_VERSION = 1  # of leaderboard.json


class Line(NamedTuple):
    """A model with its figure on each set, None where it has none, and its standing, None where it is not ranked.

    `source` is where others published the figures; None for models that were measured.
    """

    model: str
    figures: list[SetFigure | None]
    standing: Standing | None
    source: str | None


@dataclass(frozen=True)
class Leaderboard:
    """The models, the best first and then those that are not ranked, the sets, and what was merged or left out."""

    sets: list[Column]
    lines: list[Line]
    notes: list[str]
    prompts: int

    def table(self) -> pd.DataFrame:
        """Return the models that were measured: rank, group, strength, and each set with its interval and pairs."""
        rows = []
        for line in self.lines:
            if line.source is not None:
                continue
            row: dict[str, Any] = {"model": line.model, **_flat(line.standing)}
            for column, figure in zip(self.sets, line.figures, strict=True):
                names = (column.name, *(f"{column.name}/{part}" for part in ("low", "high", "pairs")))
                row |= dict(zip(names, figure or (None,) * 4, strict=True))
            rows.append(row)
        return pd.DataFrame(rows)

    def details(self) -> dict[str, Any]:
        """Return the content of leaderboard.json."""
        return {
            "generator": GENERATOR,
            "schema_version": SCHEMA_VERSION,
            "prompts": self.prompts,
            "notes": self.notes,
            "sets": [
                {"name": it.name, "benchmark": it.benchmark, "metric": it.metric, "pairs": it.most_pairs}
                for it in self.sets
            ],
            "models": [
                {
                    "model": line.model,
                    "published_by": line.source,
                    **_flat(line.standing),
                    "figures": {
                        column.name: {name: _number(value) for name, value in figure._asdict().items()}
                        for column, figure in zip(self.sets, line.figures, strict=True)
                        if figure is not None
                    },
                }
                for line in self.lines
            ],
        }


def _flat(standing: Standing | None) -> dict[str, Any]:
    """Return a standing as columns, None in each where there is none."""
    if standing is None:
        names = ("rank", "best_rank", "worst_rank", "group", "strength", "strength_low", "strength_high")
        return dict.fromkeys(names)
    ranks = {name: getattr(standing, name) for name in ("rank", "best_rank", "worst_rank", "group")}
    value, low, high = (_number(end) for end in standing.strength[:3])
    return {**ranks, "strength": value, "strength_low": low, "strength_high": high}


def _number(value: float | int) -> float | int | None:
    return None if math.isnan(value) else value


def build_leaderboard(
    sources: Sequence[str | Path],
    output_dir: str | Path,
    *,
    title: str = "Leaderboard",
    best_only: bool = False,
    equal_sets: bool = False,
) -> Path:
    """Write leaderboard.html, .csv and .json to `output_dir`, and return the page's path.

    Raises:
        ConfigError: when results are missing or of another version, or `output_dir` holds other files of these names.
        DataError: when scored pairs cannot be read, or there are no figures.
    """
    board = leaderboard(sources, best_only=best_only, equal_sets=equal_sets)
    folder = Path(output_dir)
    make_folder(folder)
    require_own_file(folder / PAGE, f'content="{GENERATOR}"')
    require_own_file(folder / TABLE, "model,rank,best_rank")
    require_own_file(folder / DETAILS, f'"generator": "{GENERATOR}"')
    write_file(folder / TABLE, board.table().to_csv(index=False))
    write_json(folder / DETAILS, board.details())
    write_file(folder / PAGE, page(board, title))
    return folder / PAGE


def leaderboard(sources: Sequence[str | Path], *, best_only: bool = False, equal_sets: bool = False) -> Leaderboard:
    """Return the leaderboard of results.

    Args:
        sources: for each run the output_file, a file beside it, or a folder of them.
        best_only: take of each results only the checkpoint that its sweep chose as the best.
        equal_sets: give each set the same weight in the ranking, in place of each prompt.

    Raises:
        ConfigError, DataError: as `build_leaderboard`.
    """
    sets, labels, notes = evaluation_sets(read_runs(sources, best_only=best_only))
    if not sets:
        raise DataError("there is nothing to rank: no row of the results has figures.")
    ranked, prompts = _ranked(sets, labels, notes, equal_sets)
    lines = [Line(labels[key], [it.figure(key) for it in sets], ranked.get(key), None) for key in labels]
    lines.sort(key=_order)
    for column in sets:
        short = [labels[key] for key in column.measured if (it := column.figure(key)) and it.pairs < column.most_pairs]
        if short:
            notes.append(
                f"On {column.name} fewer than the {column.most_pairs:,} pairs were scored of {', '.join(short)}: rows "
                "that could not be used were left out."
            )
    return Leaderboard(sets, [*lines, *_published(sets)], notes, prompts)


def _order(line: Line) -> tuple[float, str]:
    return (math.inf if line.standing is None else -line.standing.strength.value, line.model)


def _ranked(
    sets: Sequence[Column], labels: dict[str, str], notes: list[str], equal_sets: bool
) -> tuple[dict[str, Standing], int]:
    """Return the standing of each model that has pairs in common with the others, and the number of prompts."""
    tables = []
    for column in sets:
        table = column.credits()
        # A pair is a part of its prompt, and with `equal_sets` the prompt a part of its set.
        weights = 1 / table.groupby("prompt_id")["prompt_id"].transform("size")
        tables.append(table.assign(weight=weights / (weights.sum() if equal_sets else 1)))
    table = pd.concat(tables, ignore_index=True)
    if equal_sets:  # as much weight in all as without
        table["weight"] *= table["prompt_id"].nunique() / len(tables)
    keys = [key for key in labels if key in table]
    credits = table[keys].to_numpy(np.float64)
    parts = connected(credits)
    largest = int(np.bincount(parts).argmax())
    apart = [labels[key] for key, part in zip(keys, parts, strict=True) if part != largest]
    if apart:
        notes.append(f"{', '.join(apart)} cannot be ranked: no pair was scored by it and by the ranked models.")
    chosen = parts == largest
    if chosen.sum() < 2:
        return {}, int(table["prompt_id"].nunique())
    compared = (~np.isnan(credits[:, chosen])).sum(axis=1) > 1
    rows = table[compared]
    ranked = standings(credits[compared][:, chosen], rows["prompt_id"].to_numpy(), rows["weight"].to_numpy(np.float64))
    chosen_keys = [key for key, is_chosen in zip(keys, chosen, strict=True) if is_chosen]
    return dict(zip(chosen_keys, ranked, strict=True)), int(rows["prompt_id"].nunique())


def _published(sets: Sequence[Column]) -> list[Line]:
    """Return the figures of others under the same metric, a line for each model; two of one set have a line each."""
    figures: dict[str, list[SetFigure | None]] = {}
    sources: dict[str, list[str]] = {}
    for number, column in enumerate(sets):
        for it in column.published:
            if it.metric != column.metric:
                continue
            model = (
                it.model if figures.get(it.model, [None] * len(sets))[number] is None else f"{it.model} ({it.source})"
            )
            figures.setdefault(model, [None] * len(sets))[number] = SetFigure(it.value, math.nan, math.nan, 0)
            sources.setdefault(model, []).append(it.source)
    return [Line(model, line, None, "; ".join(dict.fromkeys(sources[model]))) for model, line in figures.items()]


def page(board: Leaderboard, title: str) -> str:
    """Return the page, which opens offline: its style and its script are in it, and no other script may run."""
    loader = PackageLoader("vlmrm.evaluation.leaderboard", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = loader.get_source(environment, "sort.js.jinja")[0]
    return environment.get_template("page.html.jinja").render(
        title=title,
        board=board,
        axis=_axis(board),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        version=vlmrm.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        isnan=math.isnan,
        sources=list(dict.fromkeys(line.source for line in board.lines if line.source)),
        generator=GENERATOR,
    )


def _axis(board: Leaderboard) -> tuple[float, float]:
    """Return the ends of the axis of strengths, with one half in it and room beside the intervals."""
    ends = [end for line in board.lines if line.standing for end in line.standing.strength[:3] if not math.isnan(end)]
    low, high = min([*ends, 0.5]), max([*ends, 0.5])
    room = 0.04 * (high - low) or 0.1
    return low - room, high + room
