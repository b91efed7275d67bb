"""The data sets of an evaluation: the one of a sweep, or the several of a suite, each with results of its own.

A suite is a YAML file of names and the keys of each set, or one of `SUITES`, lists of public benchmarks:

    mine: {dataset_path: my_test.jsonl, group_by: [source]}
    vl-rewardbench:
    edits: {benchmark: genai-bench-edit, dataset_path: copies/GenAI-Bench}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import Columns
from vlmrm.data.comparisons import data_fingerprint, iterate_readable, load_comparisons, load_train_and_eval
from vlmrm.data.tables import InMemory
from vlmrm.errors import ConfigError
from vlmrm.evaluation.arguments import NOT_OF_A_BENCHMARK, EvaluationArguments, check_set_keys
from vlmrm.evaluation.choosing import split_metric
from vlmrm.evaluation.leakage import Leakage
from vlmrm.evaluation.public import Benchmark, benchmark, load_benchmark
from vlmrm.evaluation.results import Results
from vlmrm.measures.pairs import PairTable, check_columns
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
    "text": ("rewardbench", "rewardbench-2", "rm-bench", "m-rewardbench"),
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
    """A data set to evaluate on: how it is read, and the table of its results.

    `name` is its name in a suite, None for the only set of a sweep. With a `benchmark` its rows are those of that, of
    which `data_args.dataset_path` may name a local copy.
    """

    name: str | None
    benchmark: Benchmark | None
    data_args: DataArguments
    group_by: tuple[str, ...]
    csv: Path

    def open(self) -> Dataset:
        """Return its comparisons.

        With `eval_fraction` these are the rows that a training of the same dataset_path and split_seed holds out.
        """
        dataset = self._load()
        if self.group_by:
            check_columns(iterate_readable(dataset), self.group_by)
        return dataset

    def _load(self) -> Any:
        data_args = self.data_args
        if self.benchmark is not None:
            return load_benchmark(self.benchmark.name, next(iter(data_args.dataset_path), None), data_args)
        if data_args.eval_fraction:
            return load_train_and_eval(data_args)[1]
        return load_comparisons(
            data_args.dataset_path,
            arguments=data_args,
            split=data_args.dataset_split,
            weights=data_args.dataset_weights,
            limit=data_args.max_eval_samples,
        )

    def results(self, args: EvaluationArguments) -> Results:
        """Return the results so far."""
        return Results(self.csv, self._settings(args), self.name)

    def _settings(self, args: EvaluationArguments) -> dict[str, Any]:
        """Return the settings, other than the checkpoint, on which a row's figures depend."""
        keys = ("dtype", "attn_implementation", "base_model_path", "batching")
        keys += ("interventions", "intervention_sample", "scorer_drops_media")
        hub = [] if self.benchmark is None else [self.benchmark.source.hub]
        return {
            "data": data_fingerprint(self.data_args.dataset_path or hub),
            "train_data": data_fingerprint(args.train_data) if args.train_data else None,
            **{key: getattr(args, key) for key in keys},
            "benchmark": None if self.benchmark is None else self.benchmark.name,
            "group_by": list(self.group_by),
            "reading": asdict(self.data_args),
        }


@dataclass(frozen=True)
class OpenSet:
    """A set whose rows can be read, with its results, and how much of it was trained on, where that is known.

    `tables` are the pairs of its comparisons that were scored, which checkpoints share.
    """

    definition: EvaluationSet
    dataset: Dataset
    results: Results
    leakage: Leakage | None
    tables: dict[Any, PairTable] = field(default_factory=dict)

    @property
    def of(self) -> str:
        """Return the end of a phrase that names it, nothing for the only set."""
        return "" if self.definition.name is None else f" of {self.definition.name}"


def evaluation_sets(args: EvaluationArguments, data_args: DataArguments) -> list[EvaluationSet]:
    """Return the sets that the arguments name.

    One set has its table in `output_file`. Those of a suite, of `data`, or of several benchmarks have theirs in the
    folder of that name, without the suffix, and `dataset_path` is then a folder with local copies of benchmarks.
    """
    csv = Path(args.output_file)
    if not is_suite(args):
        public = benchmark(args.benchmark[0]) if args.benchmark else None
        if public is None and not data_args.dataset_path:
            raise ConfigError(
                "dataset_path is missing: give the preferences to evaluate on, or a benchmark or a suite by name."
            )
        check_set_keys(data_args, args.train_data, is_benchmark=public is not None)
        _check_metric(args.metric_for_best, [])
        return [_set(None, public, data_args, args.group_by, csv)]
    definitions = (
        [(f"suite {args.suite}", name, keys) for name, keys in read_suite(args.suite).items()] if args.suite else []
    )
    definitions += [("benchmark", name, SetKeys(benchmark=name)) for name in args.benchmark]
    definitions += [("data", *_named(text)) for text in args.data]
    names = [name for _, name, _ in definitions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two sets are called {twice}: give one another name, as --data NAME=PATH or in a suite.")
    _check_metric(args.metric_for_best, names)
    if all(keys.benchmark for _, _, keys in definitions):
        check_set_keys(replace(data_args, dataset_path=[]), args.train_data, is_benchmark=True)
    copies = _copies(data_args, [keys for _, _, keys in definitions])
    folder = csv.with_suffix("")
    return [_of_keys(f"{key}: {name}", name, keys, args, data_args, copies, folder) for key, name, keys in definitions]


def is_suite(args: EvaluationArguments) -> bool:
    """Return whether the arguments name sets that have results of their own."""
    return args.suite is not None or bool(args.data) or len(args.benchmark) > 1


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
    if shared := next((key for key in keys if key not in SetKeys.model_fields and _is_shared(key)), None):
        raise ConfigError(f"{where}: {shared} is the same for all sets: give it in the configuration.")
    read = validate(SetKeys, keys, where)
    if read.benchmark is None and not read.dataset_path:
        raise ConfigError(f"{where} has neither dataset_path nor benchmark: give one of them.")
    return read


def _is_shared(key: str) -> bool:
    return key in DataArguments.__dataclass_fields__ or key in EvaluationArguments.__dataclass_fields__


def _named(text: str) -> tuple[str, SetKeys]:
    """Return the name and the keys of a value of `data`, NAME=PATH or PATH."""
    match = None if Path(text).exists() or isinstance(text, InMemory) else NAMED.fullmatch(text)
    name, path = match.groups() if match else (re.sub(r"[^\w.+-]", "_", Path(text).stem), text)
    return name, SetKeys(dataset_path=[path])


def _copies(data_args: DataArguments, definitions: Iterable[SetKeys]) -> Path | None:
    """Return the folder of local copies of benchmarks, None where `dataset_path` is not given."""
    if not data_args.dataset_path:
        return None
    folder = Path(data_args.dataset_path[0])
    if len(data_args.dataset_path) > 1 or not any(keys.benchmark and not keys.dataset_path for keys in definitions):
        raise ConfigError(
            "dataset_path beside several sets is the folder with copies of benchmarks: give data as --data NAME=PATH."
        )
    if not folder.is_dir():
        raise ConfigError(f"dataset_path is {folder}, which is no folder: name one with a copy of each benchmark.")
    return folder


def _of_keys(
    where: str,
    name: str,
    keys: SetKeys,
    args: EvaluationArguments,
    data_args: DataArguments,
    copies: Path | None,
    folder: Path,
) -> EvaluationSet:
    """Return a set from its own keys and those of the configuration."""
    public = None if keys.benchmark is None else benchmark(keys.benchmark)
    of_set = {key: getattr(keys, key) for key in keys.model_fields_set - {"benchmark", "group_by"}}
    if "dataset_path" not in of_set:
        copy = None if copies is None else copies / (keys.benchmark or "")
        of_set["dataset_path"] = [str(copy)] if copy is not None and copy.exists() else []
    unset = DataArguments()
    inherited = {} if public is None else {key: getattr(unset, key) for key in NOT_OF_A_BENCHMARK}
    try:
        made = replace(data_args, **{**inherited, **of_set})
        check_set_keys(made, args.train_data, is_benchmark=public is not None)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return _set(name, public, made, [*args.group_by, *_listed(keys.group_by)], folder / f"{name}.csv")


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _check_metric(metric: str, names: Sequence[str]) -> None:
    """Refuse a metric of a set that is not evaluated."""
    name = split_metric(metric)[0]
    if name is not None and name not in names:
        hint = did_you_mean(
            name, names, f" (there are {', '.join(names)})." if names else ", as there is only one set."
        )
        raise ConfigError(f"metric_for_best is {metric}, and no set is called {name}{hint}")


def _set(
    name: str | None, public: Benchmark | None, data_args: DataArguments, group_by: list[str], csv: Path
) -> EvaluationSet:
    by = () if public is None else public.by
    return EvaluationSet(name, public, data_args, tuple(dict.fromkeys([*group_by, *by])), csv)
