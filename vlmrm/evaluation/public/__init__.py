"""Public benchmarks: read in their published formats, scored by their authors' rules, beside published figures.

A benchmark is a YAML file in this folder with the keys of `Benchmark`; code that its rows need is a function in
`rows.py`, that of its scoring in `rules.py`. All figures are shares from 0 to 1; published ones are percentages in the
file.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import pandas as pd
from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr, model_validator

from vlmrm.conversation import Comparison
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import index_rows, sample, with_path_rules
from vlmrm.data.rows import read_row, with_row_id
from vlmrm.data.tables import KINDS, Source, open_tables
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.evaluation.public.rows import ADAPTERS, LISTS, frames_of, labelled, ratings_of
from vlmrm.evaluation.public.rules import GROUPED, RULES, Groups, rows_of, with_intervals
from vlmrm.formats.layout import image_turn, video_turn
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.pairs import not_finite
from vlmrm.settings import Strict, did_you_mean, load_file, validate

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("vlmrm")

FOLDER = Path(__file__).parent
BENCHMARKS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
THIS_EVALUATION = "this evaluation"
ANSWERS: Mapping[str, Callable[[Any], Any]] = {"text": lambda text: text, "image": image_turn, "video": video_turn}


def _known(functions: Mapping[str, Any], name: str) -> str:
    if name not in functions:
        hint = did_you_mean(name, functions, f": choose from {', '.join(functions)}")
        raise ValueError(f"there is no {name}{hint}")
    return name


class HubData(Strict):
    """Where the rows are: a hub data set, its splits and configurations, the columns `split` and `config` of a row."""

    hub: str
    splits: list[str] = Field(min_length=1)
    configs: list[str] = Field(default_factory=list)
    file: str | None = None  # the table's path in a local copy, where its name is not that of its split
    fetch: str = ""  # how to get a folder with the pictures or videos that the hub's table does not hold

    def how_to_get(self) -> str:
        """Return how to get a local copy, as the end of a sentence."""
        return self.fetch or f"get it with `hf download {self.hub} --repo-type dataset --local-dir FOLDER`"


class PublishedTable(Strict):
    """Percentages of one source as of a month (YYYY-MM): a row a model, null for a gap."""

    source: str
    date: Annotated[str, Field(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")]
    metrics: list[str]
    percent: dict[str, list[Annotated[float, Field(gt=0, lt=100)] | None]]

    @model_validator(mode="after")
    def _rows_are_whole(self) -> PublishedTable:
        for model, row in self.percent.items():
            if len(row) != len(self.metrics):
                raise ValueError(f"percent: {model} has {len(row)} figures for {len(self.metrics)} metrics")
        return self


class Published(NamedTuple):
    """A figure that was reported for a model, and its source."""

    model: str
    metric: str
    value: float
    source: str


class Benchmark(Strict):
    """A public benchmark, as its file describes it."""

    model_config = ConfigDict(frozen=True)

    title: str
    source: HubData
    # The published columns by the key of docs/data.md that each, or a list of them, fills; `ranks` become ratings.
    columns: dict[str, str | list[str]]
    optional: tuple[str, ...] = ()  # columns that a row may lack
    answers: Literal["text", "image", "video"] = "text"  # the kind of `responses`; media are files in `folder`
    folder: str = ""
    labels: dict[str, list[float]] = Field(default_factory=dict)  # ratings by value of `scores` and `by`
    by: tuple[str, ...] = ()  # keys that the rule reads as columns by/NAME of the scored pairs
    unit: str | None = None  # which of `by` names what intervals take as independent; by default the cluster
    frames: int | None = None  # how many to take of a video that is a folder of frames
    # A function in `rows.py` that names the list of a row: the rows of a list become one, with lists as cells.
    lists: Annotated[str, AfterValidator(partial(_known, LISTS))] | None = None
    adapt: Annotated[str, AfterValidator(partial(_known, ADAPTERS))] | None = None  # in `rows.py`: finishes a row
    groups: Groups = Field(default_factory=dict)  # categories by group, for the rule or `adapt`, maybe with weights
    rule: Annotated[str, AfterValidator(partial(_known, RULES))]  # in `rules.py`: the authors' scoring of scored pairs
    published: list[PublishedTable]
    verified: str  # how the schema and the rule were checked, and what could not be checked
    _name: str = PrivateAttr("")

    @model_validator(mode="after")
    def _keys_fit(self) -> Benchmark:
        keys = (*(() if self.adapt else self.by), *(("scores",) if self.labels else ()))
        if absent := [key for key in keys if key not in self.columns]:
            raise ValueError(f"columns: {absent[0]} is missing, which `by` or `labels` needs")
        if self.unit is not None and self.unit not in self.by:
            raise ValueError(f"unit: {self.unit} is not among `by`")
        if self.rule in GROUPED and not self.groups:
            raise ValueError(f"groups is missing, which the rule {self.rule} needs")
        return self

    @property
    def name(self) -> str:
        """Return the name of its file without the suffix."""
        return self._name

    @property
    def required(self) -> list[str]:
        """Return the columns that every row of the published schema has."""
        sources = ([source] if isinstance(source, str) else source for source in self.columns.values())
        return [column for columns in sources for column in columns if column not in self.optional]

    @property
    def published_figures(self) -> list[Published]:
        """Return every published figure as a share."""
        return [
            Published(model, metric, round(value / 100, 6), f"{table.source} ({table.date})")
            for table in self.published
            for model, row in table.percent.items()
            for metric, value in zip(table.metrics, row, strict=True)
            if value is not None
        ]

    def translate(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of the published schema, without its empty cells, in one of the layouts of docs/data.md."""
        row = {
            key: [cells[column] for column in source] if isinstance(source, list) else cells[source]
            for key, source in self.columns.items()
            if isinstance(source, list) or source in cells
        }
        if "ranks" in row:
            row["scores"] = ratings_of(row.pop("ranks"), str(self.columns["ranks"]))
        if self.labels:
            keys = [key for key in ("scores", *self.by) if key in self.columns]
            row["scores"] = {key: labelled(row[key], str(self.columns[key]), self.labels) for key in keys}["scores"]
        if "responses" in row:
            answer = ANSWERS[self.answers]
            row["responses"] = [
                answer(f"{self.folder}/{response}" if self.folder else response) for response in row["responses"]
            ]
        return row if self.adapt is None else row | ADAPTERS[self.adapt](cells, self.groups)

    def read(self, row: Mapping[str, Any], row_id: str, resolve: Callable[[Any], Any]) -> Comparison:
        """Return the comparison of one row; `resolve` makes its media references openable from anywhere."""
        cells = {name: value for name, value in row.items() if value is not None and value == value}  # NaN in a csv
        if missing := [name for name in self.required if name not in cells]:
            raise RowError(f"{', '.join(missing)} is empty, which {self.title} needs: check the copy", row_id)
        with with_row_id(row_id):
            translated = self.translate(cells)
        return read_row(translated, row_id, lambda media: frames_of(resolve(media), self.frames))

    def score(self, frame: pd.DataFrame) -> dict[str, float]:
        """Return the figures of scored pairs as shares, but for an average over parts of which one has no pair."""
        if frame.empty:
            raise DataError(f"{self.title} cannot be scored: there are no scored pairs")
        if missing := [name for name in self.by if f"by/{name}" not in frame]:
            raise DataError(f"{self.title} cannot be scored without {', '.join(missing)}: group by it")
        if (bad := not_finite(frame)).any():
            first = frame["comparison_id"].to_numpy()[bad][0]
            raise DataError(f"{self.title} cannot be scored: the model's score of {first} is not finite")
        return {name: float(value) for name, value in RULES[self.rule](frame, self.groups).items()}

    def estimate(self, frame: pd.DataFrame) -> dict[str, Estimate]:
        """Return `score` with intervals by cluster (see `with_intervals`), and what each figure rests on."""
        figures = self.score(frame)
        units = frame[f"by/{self.unit}" if self.unit else "cluster"].to_numpy()
        rows = {name: rows_of(name, frame, self.groups) for name in figures}
        return with_intervals(lambda part: RULES[self.rule](part, self.groups), frame, figures, units, rows)


def read_benchmark(path: Path) -> Benchmark:
    """Return the benchmark of a file; keys that it lacks come from the file that its key `like` names."""
    content = load_file(path)
    if like := content.pop("like", None):
        content = load_file(path.with_name(f"{like}.yaml")) | content
    made = validate(Benchmark, content, str(path))
    made._name = path.stem
    return made


@cache
def benchmark(name: str) -> Benchmark:
    """Return the benchmark of that name."""
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS, "")
        raise ConfigError(f"there is no benchmark {name}{hint} (there are {', '.join(BENCHMARKS)})")
    return read_benchmark(FOLDER / f"{name}.yaml")


def published_table(
    name: str, measured: Mapping[str, float | Estimate], model: str
) -> list[dict[str, str | float | Estimate | None]]:
    """Return a row for each model and source, ours first: `model`, `source`, and each metric, None where not known."""
    figures = benchmark(name).published_figures
    metrics = list(dict.fromkeys([*(figure.metric for figure in figures), *measured]))
    rows: dict[tuple[str, str], dict[str, float | Estimate]] = {(model, THIS_EVALUATION): dict(measured)}
    for figure in figures:
        rows.setdefault((figure.model, figure.source), {})[figure.metric] = figure.value
    return [
        {"model": who, "source": source, **{metric: values.get(metric) for metric in metrics}}
        for (who, source), values in rows.items()
    ]


def load_benchmark(name: str, path: str | None = None, arguments: DataArguments | None = None) -> Dataset:
    """Return rows `{"index": int, "comparison": Comparison | RowError}` of a benchmark, as `load_comparisons` does.

    `path` is a local copy, a folder or its table, by default the hub's. Of `arguments` only `image_root`,
    `path_rewrites`, `max_eval_samples` and `split_seed` are read.
    """
    chosen, arguments = benchmark(name), arguments or DataArguments()
    sources = [
        source
        for config, location in _locations(chosen, path).items()
        # A table without a folder has no splits: it counts as the last one, the test.
        for split in (chosen.source.splits[-1:] if os.path.isfile(location) else chosen.source.splits)
        for source in _open(chosen, location, split, config)
    ]
    rows = index_rows([with_path_rules(sources, arguments)], chosen.read)
    return sample(rows, None, arguments.max_eval_samples, arguments.split_seed)


def _locations(chosen: Benchmark, path: str | None) -> dict[str | None, str]:
    """Return the folder, table or hub id to open by configuration, None for a benchmark that has none."""
    source = chosen.source
    configs: list[str | None] = [*source.configs] or [None]
    if path is None:
        if source.fetch:
            raise DataError(
                f"{chosen.title} needs a local copy, as its table lacks its pictures or videos: {source.how_to_get()}"
            )
        return dict.fromkeys(configs, source.hub)
    if not os.path.exists(path):
        raise DataError(f"{path} does not exist: for {chosen.title}, {source.how_to_get()}")
    if len(configs) == 1:
        inside = [os.path.join(path, part) for part in (source.file, *source.configs) if part]
        found = next(filter(os.path.exists, inside), path)
        if source.file and found == path and os.path.isdir(path):
            raise DataError(f"{path} holds no {source.file}: for {chosen.title}, {source.how_to_get()}")
        return {configs[0]: found}
    present = {config: os.path.join(path, config) for config in source.configs if os.path.isdir(f"{path}/{config}")}
    missing = [config for config in source.configs if config not in present]
    if not present:
        raise DataError(
            f"{path} holds none of the folders {', '.join(missing)}: for {chosen.title}, {source.how_to_get()}"
        )
    if missing:
        logger.warning("%s: %s lacks %s, so its figures over all are left out", path, chosen.title, ", ".join(missing))
    return {**present}


def _open(chosen: Benchmark, location: str, split: str, config: str | None) -> list[Source]:
    sources = open_tables(_files_of(location, split) or location, split, config=config)
    origin, opened = {"split": split, "config": config}, []
    for source in sources:
        columns = source.table.column_names or []
        if missing := [name for name in chosen.required if name not in {*columns, *origin}]:
            raise DataError(
                f"{source.path} is no copy of {chosen.title}: it lacks the columns {', '.join(missing)} and has "
                f"{', '.join(columns)}"
            )
        table = source.table
        for name, value in origin.items():
            if name in chosen.required and name not in columns:
                table = table.add_column(name, [value] * len(table))
        opened.append(replace(source, table=table))
    return opened if chosen.lists is None else [_as_lists(chosen, source, LISTS[chosen.lists]) for source in opened]


def _as_lists(chosen: Benchmark, source: Source, naming: Callable[[Any], Hashable]) -> Source:
    """Return the table with a row for each list of two or more of its rows."""
    from datasets import Dataset

    lists: dict[Hashable, list[Mapping[str, Any]]] = {}
    for row in source.table:
        lists.setdefault(naming(row), []).append(row)
    compared = [rows for rows in lists.values() if len(rows) > 1]
    if not compared:
        raise DataError(f"{source.path}: no two rows of {chosen.title} can be compared: give the whole copy")
    if alone := len(lists) - len(compared):
        logger.warning("%s: %d rows of %s have none to be compared with", source.path, alone, chosen.title)
    return replace(
        source, table=Dataset.from_list([{name: [row[name] for row in rows] for name in rows[0]} for rows in compared])
    )


def _files_of(folder: str, split: str) -> str | None:
    """Return a pattern of the tables named exactly as a split; None where there are none.

    `datasets` would take `test-*` and `test_v1-*` for one split `test`.
    """
    pattern = os.path.join(glob.escape(folder), "**", f"{split}[-.]*")
    names = glob.iglob(pattern, recursive=True)
    return pattern if any(os.path.splitext(name)[1] in KINDS for name in names) else None
