"""`vlmrm eval`: evaluate every checkpoint of every training, or other scorers, on one data set or more.

Each data set has a table of its own with a row for each of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from vlmrm.config import Configuration, parse
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import iterate_comparisons
from vlmrm.data.tables import name_tables
from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError, DataError, RowError
from vlmrm.evaluation.arguments import EvaluationArguments, check_data_keys
from vlmrm.evaluation.choosing import Criterion, split_metric
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.evaluate import evaluate_entry, opened
from vlmrm.evaluation.leakage import leakage, open_rows, verdict
from vlmrm.evaluation.results import beside_published, describe, digest
from vlmrm.evaluation.schema import Best, Row
from vlmrm.evaluation.scorers import scorer_entries
from vlmrm.evaluation.scorers.checkpoint import CheckpointEntry
from vlmrm.evaluation.suite import EvaluationSet, OpenSet, evaluation_sets, suite_rows, suite_table
from vlmrm.files import exclusive_lock, write_file
from vlmrm.logs import counted, start_log
from vlmrm.measures.outputs import Reference, scale_of
from vlmrm.modeling.manifest import COMPLETE, TRAINING_LOCK, find_checkpoints, read_reward_file, save_scale
from vlmrm.outputs import ONE, Outputs

logger = logging.getLogger("vlmrm")


@dataclass(frozen=True)
class SweepResult:
    """The table's rows, in the order of evaluation, and the one that `metric_for_best` chose.

        result.best["preference_accuracy"], result.rows, result.csv

    Of a suite, a row has those of its sets under `sets`, and there is no such file as `scores`.
    """

    rows: list[Row]
    choice: Best | None
    csv: Path
    scores: Path  # every pair, as parquet
    paths: frozenset[str]  # of the rows that this sweep was about; others are of earlier ones with this output
    sets: Mapping[str, SweepResult] = field(default_factory=dict)  # the result of each set of a suite
    unread: Mapping[str, str] = field(default_factory=dict)  # why a set could not be evaluated

    @property
    def best(self) -> Row | None:
        """Return the row that was chosen; None where none has figures."""
        return next((row for row in self.rows if self.choice and row["path"] == self.choice["path"]), None)


def sweep(config: Configuration = (), /, **keys: Any) -> SweepResult:
    """Evaluate every checkpoint that has no row in the results yet, and choose the best, as `vlmrm eval` does.

        evaluate(model_dirs="outputs/mine", dataset_path="test.jsonl", output_file="results/mine.csv").best

    Args:
        config: a YAML or JSON file, a mapping of keys to values, or the words of a command line.
        keys: keys of the configuration, which override those of `config`. `dataset_path` may be a `datasets.Dataset`.

    Raises:
        ConfigError: when no checkpoint can be evaluated or chosen, or the results are of other data or in use.
        BelowThreshold: when the best checkpoint is below `fail_under`.
        DataError: when the data cannot be read. A checkpoint that cannot be read is a row with its error.
    """
    config = name_tables(config) if isinstance(config, Mapping) else config
    args, data_args = parse((EvaluationArguments, DataArguments), config, "eval_rm.py", **name_tables(keys))
    check_data_keys(data_args)
    if data_args.outputs is None and (outputs := trained_outputs(args)) != ONE:
        data_args = replace(data_args, **outputs.keys())
    sets = evaluation_sets(args, data_args)
    log_path = start_log("eval")
    processes = launched()
    with sole_sweep([Path(args.output_file), *(it.csv for it in sets if it.name)], processes):
        entries = entries_to_evaluate(args)
        unread: dict[str, str] = {}
        main = processes.is_main_process
        opened_sets = [found for it in sets if (found := open_set(it, entries, args, unread, main=main))]
        if not opened_sets:
            raise DataError(f"none of the {len(sets)} data sets can be read: {_listed(unread)}")
        count = counted(len(entries), "model")
        rows = " and ".join(f"{len(it.dataset):,} comparisons{it.of}" for it in opened_sets)
        logger.info("Evaluating %s on %s; log: %s", count, rows, log_path)
        # Images are opened and processed for the first checkpoint and kept for the others.
        with TemporaryDirectory(prefix="vlmrm-images-") as images:
            run = SweepRun(args, data_args, processes, Path(images))
            evaluate_all(entries, opened_sets, run, unread)
        return conclude(opened_sets, entries, unread, args, main=main)


@contextmanager
def sole_sweep(tables: Sequence[Path], processes: PartialState) -> Generator[None]:
    """Hold the locks of the results in the first process of this sweep; raise on all if another sweep has one."""
    with ExitStack() as held:
        refused = None
        try:
            for csv in tables if processes.is_main_process else ():
                refusal = f"{csv} is being written by another sweep: wait for its end, or choose another output_file."
                held.enter_context(exclusive_lock(csv.with_name(f"{csv.name}.lock"), refusal))
        except ConfigError as error:
            refused = str(error)
        [refused] = broadcast_object_list([refused])
        if refused is not None:
            raise ConfigError(refused)
        yield


def conclude(
    sets: Sequence[OpenSet],
    entries: Sequence[Entry],
    unread: Mapping[str, str],
    args: EvaluationArguments,
    *,
    main: bool,
) -> SweepResult:
    """Choose the best of all rows and compare it with `fail_under`; the `main` process alone writes."""
    results = {it.definition.name: it.results for it in sets if it.definition.name not in unread}
    if not results:
        raise DataError(f"none of the {len(sets)} data sets can be scored: {_listed(unread)}")
    alone, chosen_by = results.get(None), split_metric(args.metric_for_best)[0]
    if chosen_by is not None and chosen_by in unread:
        raise DataError(f"{chosen_by}, by which metric_for_best chooses, cannot be evaluated: {unread[chosen_by]}")
    named = {str(name): it for name, it in results.items() if name is not None}
    rows = suite_rows(named)
    criterion = criterion_of(args, rows, (chosen_by,) if chosen_by else tuple(named))
    csv, frame = Path(args.output_file), None  # of the mean of several sets the luck of the choice is not known
    if alone is not None:
        rows, criterion, frame = alone.rows, criterion_of(args, alone.rows), alone.frame
    paths = frozenset(entry.path for entry in entries)
    best = criterion.best(rows, frame)
    for it in results.values():
        it.best = best if alone is not None else best or it.best
        if main:
            it.write_tables()
    if main and alone is None:
        write_file(csv, suite_table(rows, tuple(named), criterion, best).to_csv(index=False))
    try:
        criterion.require(rows)
    except ConfigError as error:
        raise ConfigError(f"{csv} has every checkpoint, but none is best: {error}") from None
    if main and best is not None and args.save_normalization and Path(best["path"]).is_dir():
        data = (
            alone.settings["data"] if alone is not None else digest([it.settings["data"] for it in results.values()])
        )
        keep_scale(best["path"], [it.references_of(best) for it in results.values()], data)
    if args.fail_under is not None and (best is None or best["value"] < args.fail_under):
        reached = "no checkpoint has figures" if best is None else f"{best['path']}, the best, has {best['value']:.4f}"
        metric = f"{args.metric_for_best} is below the {args.fail_under} of fail_under"
        raise BelowThreshold(f"{reached}: {metric}: see {csv}.")
    of_sets = {name: SweepResult(it.rows, it.best, it.csv, it.parquet, paths) for name, it in named.items()}
    return SweepResult(rows, best, csv, csv.with_suffix(".scores.parquet"), paths, of_sets, unread)


def keep_scale(path: str, of_sets: Sequence[Mapping[str, Reference]], data: str) -> None:
    """Save with a checkpoint how its scores on some sets are distributed, those of each output too, or log why not."""
    if not all(of_sets):
        logger.info("%s was scored by an earlier sweep: vlmrm calibrate measures its scale anew", path)
        return
    pooled = {
        name: Reference(*map(np.concatenate, zip(*(it[name] for it in of_sets if name in it), strict=True)))
        for name in dict.fromkeys(name for it in of_sets for name in it)
    }
    if not (scale := scale_of(pooled)):
        logger.warning("All scores of %s are equal: nothing is saved to normalise by", path)
        return
    try:
        saved = save_scale(path, {**scale, "reward_data": data})
    except (ConfigError, CheckpointError) as error:
        logger.warning("The scale of the scores is not saved with the best checkpoint: %s", error)
        return
    if saved:
        mean, std = scale["reward_mean"], scale["reward_std"]
        logger.info("Saved with %s: its scores are %.4f ± %.4f on these data", path, mean, std)


def _listed(unread: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in unread.items())


def criterion_of(args: EvaluationArguments, rows: Sequence[Any], sets: tuple[str, ...] = ()) -> Criterion:
    """Return the criterion by which one set chooses, or the mean of several."""
    asked = Criterion(split_metric(args.metric_for_best)[1], sets)
    return asked.for_rows(rows) if args.fail_under is None else asked


def open_set(
    definition: EvaluationSet,
    entries: Sequence[Entry],
    args: EvaluationArguments,
    unread: dict[str, str],
    *,
    main: bool,
) -> OpenSet | None:
    """Return a set with its results so far, the only one or raise; why one of a suite has none goes into `unread`."""
    failed: Exception | None = None
    dataset: Any = None
    try:
        dataset = definition.open()
        results = definition.results(args)
    except (DataError, ConfigError) as error:
        failed = error
    # All ranks go on without a set that one of them cannot read.
    failure = next((error for error in gather_object([failed]) if error is not None), None)
    if failure is None:
        leaked = None
        if args.train_data:  # one process computes it
            trained_on = open_rows(args.train_data, definition.data_args)
            [leaked] = broadcast_object_list([leakage(trained_on, iterate_comparisons(dataset)) if main else None])
            logger.info("Leakage: %s", verdict(leaked))
        results.leakage = None if leaked is None else leaked.block()
        return OpenSet(definition, dataset, results, leaked)
    if main and dataset is None:
        # Unless the files cannot be written, or hold other results, which are kept.
        with suppress(ConfigError, DataError):
            results = definition.results(args)
            for entry in entries:
                if not results.holds(entry):
                    results.add(entry.row(str(failure)), None)
            results.write()
    if definition.name is None:
        raise failure
    logger.error("%s cannot be evaluated: %s", definition.name, failure)
    unread[definition.name] = str(failure)
    return None


def launched() -> PartialState:
    """Return the state of the launcher's ranks; warn if CUDA_VISIBLE_DEVICES names a GPU and there is none."""
    available, visible = torch.accelerator.is_available(), os.environ.get("CUDA_VISIBLE_DEVICES", "-1")
    if not available and visible not in ("", "-1"):
        logger.warning("There is no GPU %s here: evaluating on the CPU", visible)
    return PartialState(cpu=not available)


def entries_to_evaluate(args: EvaluationArguments) -> list[Entry]:
    """Return the entries of the table."""
    # As the first rank sees them: a training may write and delete some meanwhile.
    [folders] = broadcast_object_list([[path for folder in args.model_dirs for path in checkpoints_of(folder, args)]])
    return [*map(CheckpointEntry, folders), *scorer_entries(args.scorer)]


def trained_outputs(args: EvaluationArguments) -> Outputs:
    """Return the outputs that all models were trained with; the default where they differ."""
    folders = [found for it in args.model_dirs for found in find_checkpoints(it, args.checkpoint_pattern) or [it]]
    if not all(Path(it).is_dir() for it in args.scorer):
        return ONE
    described = []
    for folder in (*folders, *args.scorer):
        with suppress(CheckpointError):  # opening it raises the same error
            described.append((read_reward_file(folder) or {}).get("outputs"))
    return Outputs.of(described[0]) if described and all(it == described[0] for it in described) else ONE


def evaluate_all(entries: Sequence[Entry], sets: Sequence[OpenSet], run: SweepRun, unread: dict[str, str]) -> None:
    """Evaluate the entries on the sets that lack them, each opened once.

    The reason why a set of a suite cannot be scored goes into `unread`, and the sweep continues without it.
    """
    for entry in entries:
        readable = [it for it in sets if it.definition.name not in unread]
        # One process decides for all: a service, whose digest is asked for, may not answer each alike.
        main = run.processes.is_main_process
        [held] = broadcast_object_list([[it.results.holds(entry) for it in readable] if main else None])
        lacking = [it for it, has in zip(readable, held, strict=True) if not has]
        for it in (it for it, has in zip(readable, held, strict=True) if has):
            logger.info("%s: already in %s", entry.path, it.results.csv)
        if lacking:
            evaluate_on(lacking, entry, run, unread)


def evaluate_on(sets: Sequence[OpenSet], entry: Entry, run: SweepRun, unread: dict[str, str]) -> None:
    """Evaluate one entry on each of the sets, and write their results."""
    started = time.perf_counter()
    with opened(entry, run) as scorer:
        for it in sets:
            try:
                row, frame = evaluate_entry(entry, scorer, it, run)
            except RowError as error:
                if it.definition.name is None:
                    raise
                logger.error("%s cannot be scored: %s", it.definition.name, error)
                unread[it.definition.name] = str(error)
                continue
            row["seconds"] = round(time.perf_counter() - started, 3)
            started = time.perf_counter()
            results = it.results
            results.add(row, frame)
            results.best = criterion_of(run.args, results.rows).best(results.rows)
            if run.processes.is_main_process:
                results.write()
            logger.info("%s%s: %s", entry.path, it.of, describe(row))
            if it.definition.benchmark is not None and not row["error"]:
                logger.info("%s", beside_published(it.definition.benchmark.name, row))


def checkpoints_of(model_dir: str, args: EvaluationArguments) -> list[Path]:
    """Return the checkpoints of one of `model_dirs`, in natural order; the folder itself where it is one."""
    folder = Path(model_dir)
    folders = find_checkpoints(folder, args.checkpoint_pattern)
    if (folder / TRAINING_LOCK).exists():
        half_written = [path for path in folders if not (path / COMPLETE).is_file()]
        for path in half_written:
            logger.warning("%s is left out: saving it has not ended, or was interrupted", path)
        folders = [path for path in folders if path not in half_written]
    if not folders and ((folder / "config.json").exists() or (folder / "adapter_config.json").exists()):
        folders = [folder]
    if not folders:
        reason = "it does not exist" if not folder.is_dir() else f"nothing in it matches {args.checkpoint_pattern}"
        raise ConfigError(f"model_dirs: {folder} has no checkpoints ({reason}).")
    return folders
