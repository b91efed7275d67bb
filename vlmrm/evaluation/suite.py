"""The data sets of an evaluation: the one of a sweep, or the several of a suite, each with results of its own.

A suite is a YAML file of names and the keys of each set, or one of `SUITES`, lists of public benchmarks:

    mine: {dataset_path: my_test.jsonl, group_by: [source]}
    vl-rewardbench:
    edits: {benchmark: genai-bench-edit, dataset_path: copies/GenAI-Bench}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
from datasets import Dataset

from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import Columns
from vlmrm.data.comparisons import data_fingerprint, iterate_readable, load_comparisons, load_train_and_eval
from vlmrm.data.tables import InMemory
from vlmrm.errors import ConfigError
from vlmrm.evaluation.arguments import NOT_OF_A_BENCHMARK, EvaluationArguments, check_set_keys
from vlmrm.evaluation.choosing import Criterion, split_metric
from vlmrm.evaluation.leakage import Leakage
from vlmrm.evaluation.public import Benchmark, benchmark, load_benchmark
from vlmrm.evaluation.results import Results
from vlmrm.evaluation.schema import Best, Row
from vlmrm.measures.donors import WHOLE
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.pairs import PairTable, check_columns
from vlmrm.outputs import Outputs
from vlmrm.settings import Strict, did_you_mean, load_file, validate

SUITES: Mapping[str, tuple[str, ...]] = {
    "image-understanding": (
        *("vl-rewardbench", "multimodal-rewardbench", "multimodal-rewardbench-2", "mm-rlhf-rewardbench"),
        "omni-rewardbench",
    ),
    "image-generation": (*("genai-bench-image", "hpdv2", "hpdv3", "hpdv3-plusplus", "imagereward", "pick-a-pic"),),
    "image-editing": ("genai-bench-edit", "editreward-bench-tiger", "editreward-bench-editscore"),
    "video": ("genai-bench-video", "videogen-rewardbench"),
    "robots": ("roborewardbench",),
    "text": ("rewardbench", "rewardbench-2", "rm-bench"),
}
NAME = re.compile(r"\w[\w.+-]*")  # a set's files have its name
NAMED = re.compile(rf"({NAME.pattern})=(.+)")  # NAME=PATH


class SetKeys(Strict):
    """What a suite says of a set; a key that is left out is that of the configuration."""

    benchmark: str | None = None
    dataset_path: str | list[str] | None = None
    dataset_split: str | None = None
    dataset_weights: list[float] | None = None
    eval_fraction: float | None = None
    split_seed: int | None = None
    max_eval_samples: int | None = None
    image_root: str | None = None
    images: str | None = None
    columns: Columns | list[str] | None = None
    path_rewrites: list[str] | None = None
    group_by: str | list[str] | None = None


@dataclass(frozen=True)
class EvaluationSet:
    """A data set to evaluate on: how it is read, and the table of its results."""

    name: str | None  # in a suite, None for the only set of a sweep
    benchmark: Benchmark | None  # whose rows they are; `data_args.dataset_path` may name a local copy
    data_args: DataArguments
    group_by: tuple[str, ...]
    csv: Path
    cluster_by: str | None = None

    def __post_init__(self):
        by = () if self.benchmark is None else self.benchmark.by
        object.__setattr__(self, "group_by", tuple(dict.fromkeys([*self.group_by, *by])))

    def open(self) -> Dataset:
        """Return its comparisons, with `eval_fraction` those that a training with the same keys holds out."""
        data_args = self.data_args
        if self.benchmark is not None:
            dataset = load_benchmark(self.benchmark.name, next(iter(data_args.dataset_path), None), data_args)
        elif data_args.eval_fraction:
            dataset = load_train_and_eval(data_args)[1]
        else:
            dataset = load_comparisons(
                data_args.dataset_path,
                arguments=data_args,
                split=data_args.dataset_split,
                weights=data_args.dataset_weights,
                limit=data_args.max_eval_samples,
            )
        rows = cast(Dataset, dataset)
        columns = [*self.group_by, *([self.cluster_by] if self.cluster_by not in (None, WHOLE) else [])]
        if columns:
            check_columns(iterate_readable(rows), columns)
        return rows

    def results(self, args: EvaluationArguments) -> Results:
        """Return the results so far, of the settings, other than the checkpoint, on which figures depend."""
        keys = ("dtype", "attn_implementation", "base_model_path", "batching")
        keys += ("interventions", "intervention_sample", "scorer_drops_media")
        hub = [] if self.benchmark is None else [self.benchmark.source.hub]
        settings = {
            "data": data_fingerprint(self.data_args.dataset_path or hub),
            "train_data": data_fingerprint(args.train_data) if args.train_data else None,
            **{key: getattr(args, key) for key in keys},
            "benchmark": None if self.benchmark is None else self.benchmark.name,
            "group_by": list(self.group_by),
            "cluster_by": self.cluster_by,
            "reading": {**asdict(self.data_args), "outputs": self.data_args.named_outputs.described(), "total": None},
        }
        return Results(self.csv, settings, self.name)


@dataclass(frozen=True)
class OpenSet:
    """A set whose rows can be read, with its results."""

    definition: EvaluationSet
    dataset: Dataset
    results: Results
    leakage: Leakage | None  # how much of it was trained on, where that is known
    tables: dict[Any, PairTable] = field(default_factory=dict)  # pairs that were scored, which checkpoints share

    @property
    def of(self) -> str:
        """Return the end of a phrase that names it, nothing for the only set."""
        return "" if self.definition.name is None else f" of {self.definition.name}"


def evaluation_sets(args: EvaluationArguments, data_args: DataArguments) -> list[EvaluationSet]:
    """Return the sets that the arguments name.

    One set has its table in `output_file`; several have theirs in the folder of that name, without the suffix, and
    `dataset_path` is then a folder with local copies of benchmarks.
    """
    csv = Path(args.output_file)
    if args.suite is None and not args.data and len(args.benchmark) <= 1:
        public = benchmark(args.benchmark[0]) if args.benchmark else None
        if public is None and not data_args.dataset_path:
            raise ConfigError(
                "dataset_path is missing: give the preferences to evaluate on, or a benchmark or a suite by name."
            )
        check_set_keys(data_args, args.train_data, is_benchmark=public is not None)
        _check_metric(args.metric_for_best, [], data_args.named_outputs)
        read = data_args if public is None else replace(data_args, outputs=None, total=None)
        return [EvaluationSet(None, public, read, tuple(args.group_by), csv, args.cluster_by)]
    definitions = (
        [(f"suite {args.suite}", name, keys) for name, keys in read_suite(args.suite).items()] if args.suite else []
    )
    definitions += [("benchmark", name, SetKeys(benchmark=name)) for name in args.benchmark]
    for text in args.data:  # NAME=PATH or PATH
        match = None if Path(text).exists() or isinstance(text, InMemory) else NAMED.fullmatch(text)
        name, path = match.groups() if match else (re.sub(r"[^\w.+-]", "_", Path(text).stem), text)
        definitions.append(("data", name, SetKeys(dataset_path=[path])))
    names = [name for _, name, _ in definitions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two sets are called {twice}: give one another name, as --data NAME=PATH or in a suite.")
    _check_metric(args.metric_for_best, names, data_args.named_outputs)
    if all(keys.benchmark for _, _, keys in definitions):
        check_set_keys(replace(data_args, dataset_path=[]), args.train_data, is_benchmark=True)
    copies, unset, sets = Path(next(iter(data_args.dataset_path), "")), DataArguments(), []
    if data_args.dataset_path:
        may_be_copied = any(keys.benchmark and not keys.dataset_path for _, _, keys in definitions)
        if len(data_args.dataset_path) > 1 or not may_be_copied:
            raise ConfigError(
                "dataset_path beside several sets is the folder with copies of benchmarks: give data as --data "
                "NAME=PATH."
            )
        if not copies.is_dir():
            raise ConfigError(f"dataset_path is {copies}, which is no folder: name one with a copy of each benchmark.")
    for key, name, keys in definitions:
        public = None if keys.benchmark is None else benchmark(keys.benchmark)
        of_set = {it: getattr(keys, it) for it in keys.model_fields_set - {"benchmark", "group_by"}}
        if "dataset_path" not in of_set:
            copy = copies / (keys.benchmark or "")
            of_set["dataset_path"] = [str(copy)] if data_args.dataset_path and copy.exists() else []
        not_read = () if public is None else (*NOT_OF_A_BENCHMARK, "outputs", "total")
        inherited = {it: getattr(unset, it) for it in not_read}
        own = [keys.group_by] if isinstance(keys.group_by, str) else keys.group_by or []
        try:
            made = replace(data_args, **{**inherited, **of_set})
            check_set_keys(made, args.train_data, is_benchmark=public is not None)
        except ConfigError as error:
            raise ConfigError(f"{key}: {name}: {error}") from None
        own_csv = csv.with_suffix("") / f"{name}.csv"
        sets.append(EvaluationSet(name, public, made, (*args.group_by, *own), own_csv, args.cluster_by))
    return sets


def read_suite(suite: str) -> dict[str, SetKeys]:
    """Return the keys of each set of a suite, one of `SUITES` or a file."""
    if suite in SUITES:
        return {name: SetKeys(benchmark=name) for name in SUITES[suite]}
    path = Path(suite)
    if not path.is_file():
        hint = did_you_mean(suite, SUITES, f": name a YAML file, or one of {', '.join(SUITES)}.")
        raise ConfigError(f"there is no suite {suite}{hint}")
    content = load_file(path)
    if not content:
        raise ConfigError(f"{path} names no set: write `NAME: {{dataset_path: FILE}}` lines.")
    return {str(name): _read_set(path, str(name), keys) for name, keys in content.items()}


def _read_set(path: Path, name: str, keys: Any) -> SetKeys:
    where = f"{path}: {name}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where} cannot be the name of a set: use letters, digits, and . _ + - only.")
    if isinstance(keys, str):
        keys = {"dataset_path": keys}
    if keys is None or keys == {}:
        keys = {"benchmark": name}
    if not isinstance(keys, dict):
        raise ConfigError(f"{where} must be a path, or hold `key: value` lines.")
    known = {**DataArguments.__dataclass_fields__, **EvaluationArguments.__dataclass_fields__}
    if shared := next((key for key in keys if key in known and key not in SetKeys.model_fields), None):
        raise ConfigError(f"{where}: {shared} is the same for all sets: give it in the configuration.")
    read = validate(SetKeys, keys, where)
    if read.benchmark is None and not read.dataset_path:
        raise ConfigError(f"{where} has neither dataset_path nor benchmark: give one of them.")
    return read


def _check_metric(metric: str, names: Sequence[str], outputs: Outputs) -> None:
    """Refuse a metric of a set that is not evaluated, or of an output that is not measured."""
    name, figure = split_metric(metric)
    if Criterion(figure).of_output and figure not in outputs.figures:
        hint = did_you_mean(figure, [*METRICS, *outputs.figures], ": name the outputs in the key outputs.")
        raise ConfigError(f"metric_for_best is {metric}, which no evaluation has{hint}")
    if name is not None and name not in names:
        there_are = f" (there are {', '.join(names)})." if names else ", as there is only one set."
        hint = did_you_mean(name, names, there_are)
        raise ConfigError(f"metric_for_best is {metric}, and no set is called {name}{hint}")


def suite_rows(sets: Mapping[str, Results]) -> list[Any]:
    """Return a row for each checkpoint, in the order of evaluation, with its rows by set; it has all their errors."""
    by_path: dict[str, dict[str, Row]] = {}
    for name, results in sets.items():
        for row in results.rows:
            by_path.setdefault(row["path"], {})[name] = row
    rows = []
    for of_sets in by_path.values():
        first = next(iter(of_sets.values()))
        errors = {name: of_sets[name]["error"] if name in of_sets else "not evaluated" for name in sets}
        error = "; ".join(f"{name}: {error}" for name, error in errors.items() if error) or None
        seconds = sum(row["seconds"] for row in of_sets.values())
        about = {key: first[key] for key in ("model", "checkpoint", "path")}
        rows.append({**about, "error": error, "seconds": seconds, "sets": of_sets})
    return rows


def suite_table(rows: Sequence[Any], sets: Sequence[str], criterion: Criterion, best: Best | None) -> pd.DataFrame:
    """Return a line for each of `suite_rows`: the figure of `metric_for_best` on each set with its interval."""
    lines, of_set = [], replace(criterion, sets=())
    for row in rows:
        line: dict[str, Any] = {"model": row["model"], "checkpoint": row["checkpoint"]}
        line[criterion.label] = math.nan if row["error"] else criterion.number(row, "value")
        for name in sets:
            measured = row["sets"].get(name, {"error": "not evaluated"})
            for column, part in ((name, "value"), (f"{name}/low", "low"), (f"{name}/high", "high")):
                line[column] = math.nan if measured["error"] else of_set.number(measured, part)
        line |= {"error": row["error"], "seconds": row["seconds"]}
        lines.append(line | {"best": best is not None and row["path"] == best["path"]})
    return pd.DataFrame(lines)
