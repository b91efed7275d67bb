"""`vlmrm eval`: evaluate every checkpoint of every training, or other scorers, on one data set or more.

Each data set has a table of its own with a row for each of them. With `watch`, checkpoints of running trainings are
evaluated as soon as each is complete.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset

from vlmrm.config import Configuration, parse
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import iterate_comparisons
from vlmrm.data.tables import name_tables
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.evaluation.arguments import EvaluationArguments, check_data_keys
from vlmrm.evaluation.choosing import Criterion, split_metric
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.evaluate import evaluate_entry, opened
from vlmrm.evaluation.leakage import Leakage, leakage, open_rows, verdict
from vlmrm.evaluation.results import beside_published, describe
from vlmrm.evaluation.scorers import scorer_entries
from vlmrm.evaluation.scorers.checkpoint import CheckpointEntry
from vlmrm.evaluation.suite import EvaluationSet, OpenSet, evaluation_sets, is_suite
from vlmrm.evaluation.suite_table import SuiteTable, mean_criterion
from vlmrm.evaluation.sweep_result import SweepResult, conclude
from vlmrm.files import exclusive_lock
from vlmrm.logs import counted, start_log
from vlmrm.modeling.manifest import COMPLETE, TRAINING_LOCK, find_checkpoints, is_finished

logger = logging.getLogger("vlmrm")
INTERVAL = 15.0  # seconds between two searches for new checkpoints


def sweep(config: Configuration = (), /, **keys: Any) -> SweepResult:
    """Evaluate every checkpoint that has no row in the results yet, and choose the best, as `vlmrm eval` does.

        evaluate(model_dirs="outputs/mine", dataset_path="test.jsonl", output_file="results/mine.csv").best

    Args:
        config: a YAML or JSON file, a mapping of keys to values, or the words of a command line.
        keys: keys of the configuration, which override those of `config`. `dataset_path` may be a `datasets.Dataset`.

    Raises:
        ConfigError: when there is no checkpoint to evaluate or none can be chosen, the results are of other data or
            settings, or another sweep is writing them.
        BelowThreshold: when the best checkpoint is below `fail_under`.
        DataError: when the data cannot be read. A checkpoint that cannot be read is a row with its error.
    """
    config = name_tables(config) if isinstance(config, Mapping) else config
    args, data_args = parse((EvaluationArguments, DataArguments), config, "eval_rm.py", **name_tables(keys))
    check_data_keys(data_args)
    sets = evaluation_sets(args, data_args)
    log_path = start_log("eval")
    processes = launched()
    with sole_sweep([Path(args.output_file), *(it.csv for it in sets if it.name)], processes):
        return run_sweep(sets, args, data_args, processes, log_path)


@contextmanager
def sole_sweep(tables: Sequence[Path], processes: PartialState) -> Generator[None]:
    """Hold the locks of the results in the first process of this sweep, and tell the others if one is taken.

    Raises:
        ConfigError: on every process, when another sweep is writing them.
    """
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


def run_sweep(
    sets: Sequence[EvaluationSet],
    args: EvaluationArguments,
    data_args: DataArguments,
    processes: PartialState,
    log_path: Path | None,
) -> SweepResult:
    """Evaluate with parsed arguments, with the results locked."""
    entries = entries_to_evaluate(args)
    unread: dict[str, str] = {}
    opened_sets = [it for definition in sets if (it := open_set(definition, entries, args, processes, unread))]
    if not opened_sets:
        raise DataError(f"none of the {len(sets)} data sets can be read: {_listed(unread)}")
    count = counted(len(entries), "model") if isinstance(entries, list) else "checkpoints as they come"
    rows = " and ".join(f"{len(it.dataset):,} comparisons{it.of}" for it in opened_sets)
    logger.info("Evaluating %s on %s; log: %s", count, rows, log_path)
    # Images are opened and processed for the first checkpoint and kept for the others.
    with TemporaryDirectory(prefix="vlmrm-images-") as images:
        run = SweepRun(args, data_args, processes, Path(images))
        looked_at = evaluate_all(entries, opened_sets, run, unread)
    main = processes.is_main_process
    paths = frozenset(entry.path for entry in looked_at)
    if not is_suite(args):
        [results] = (it.results for it in opened_sets)
        best = conclude(results, criterion_of(args), looked_at, args, main=main)
        return SweepResult(results.rows, best, results.csv, results.parquet, paths)
    read = {str(it.definition.name): it.results for it in opened_sets if it.definition.name not in unread}
    if not read:
        raise DataError(f"none of the {len(sets)} data sets can be scored: {_listed(unread)}")
    chosen_by = split_metric(args.metric_for_best)[0]
    if chosen_by in unread:
        raise DataError(f"{chosen_by}, by which metric_for_best chooses, cannot be evaluated: {unread[chosen_by]}")
    criterion = mean_criterion(args.metric_for_best, args.one_standard_error, tuple(read))
    table = SuiteTable(Path(args.output_file), read, criterion)
    best = conclude(table, criterion, looked_at, args, main=main)
    of_sets = {name: SweepResult(it.rows, it.best, it.csv, it.parquet, paths) for name, it in read.items()}
    return SweepResult(table.rows, best, table.csv, table.csv.with_suffix(".scores.parquet"), paths, of_sets, unread)


def _listed(unread: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in unread.items())


def criterion_of(args: EvaluationArguments) -> Criterion:
    """Return the criterion by which one set chooses."""
    return Criterion(split_metric(args.metric_for_best)[1], args.one_standard_error)


def open_set(
    definition: EvaluationSet,
    entries: Iterable[Entry],
    args: EvaluationArguments,
    processes: PartialState,
    unread: dict[str, str],
) -> OpenSet | None:
    """Return a set with its results so far; the reason why one of a suite cannot be read goes into `unread`.

    Raises:
        ConfigError, DataError: when the only set cannot be read, or its results are of other data or settings.
    """
    failed: Exception | None = None
    dataset: Any = None
    try:
        dataset = definition.open()
        results = definition.results(args)
    except (DataError, ConfigError) as error:
        failed = error
    # All ranks go on without a set that one of them cannot read.
    failures = [error for error in gather_object([failed]) if error is not None]
    if failures:
        if processes.is_main_process and dataset is None and isinstance(entries, list):
            write_failure(entries, failures[0], definition, args)
        if definition.name is None:
            raise failures[0]
        logger.error("%s cannot be evaluated: %s", definition.name, failures[0])
        unread[definition.name] = str(failures[0])
        return None
    leaked = find_leakage(dataset, args.train_data, definition.data_args, processes) if args.train_data else None
    results.leakage = None if leaked is None else leaked.block()
    return OpenSet(definition, dataset, results, leaked)


def launched() -> PartialState:
    """Return the state of the launcher's ranks; warn if CUDA_VISIBLE_DEVICES names a GPU and there is none."""
    available, visible = torch.accelerator.is_available(), os.environ.get("CUDA_VISIBLE_DEVICES", "-1")
    if not available and visible not in ("", "-1"):
        logger.warning("There is no GPU %s here: evaluating on the CPU", visible)
    return PartialState(cpu=not available)


def entries_to_evaluate(args: EvaluationArguments) -> Iterable[Entry]:
    """Return the entries of the table; with `watch`, an iterator that waits for new checkpoints."""
    if args.watch:
        return map(CheckpointEntry, watch(args.model_dirs, args.checkpoint_pattern, timeout=60 * args.watch_timeout))
    # As the first rank sees them: a training may write and delete some meanwhile.
    [folders] = broadcast_object_list([[path for folder in args.model_dirs for path in checkpoints_of(folder, args)]])
    return [*map(CheckpointEntry, folders), *scorer_entries(args.scorer)]


def evaluate_all(
    entries: Iterable[Entry], sets: Sequence[OpenSet], run: SweepRun, unread: dict[str, str]
) -> list[Entry]:
    """Evaluate the entries on the sets that lack them, each opened once, and return all entries; Ctrl-C ends a watch.

    The reason why a set of a suite cannot be scored goes into `unread`, and the sweep continues without it.
    """
    looked_at: list[Entry] = []
    try:
        for entry in entries:
            looked_at.append(entry)
            readable = [it for it in sets if it.definition.name not in unread]
            # One process decides for all: a service, whose digest is asked for, may not answer each alike.
            main = run.processes.is_main_process
            [held] = broadcast_object_list([[it.results.holds(entry) for it in readable] if main else None])
            lacking = [it for it, has in zip(readable, held, strict=True) if not has]
            for it in (it for it, has in zip(readable, held, strict=True) if has):
                logger.info("%s: already in %s", entry.path, it.results.csv)
            if lacking:
                evaluate_on(lacking, entry, run, unread)
    except KeyboardInterrupt:
        if not run.args.watch:
            raise
        logger.warning("Stopped watching")
    return looked_at


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
            results.best = criterion_of(run.args).best(results.rows)
            if run.processes.is_main_process:
                results.write()
            logger.info("%s%s: %s", entry.path, it.of, describe(row))
            if it.definition.benchmark is not None and not row["error"]:
                logger.info("%s", beside_published(it.definition.benchmark.name, row))


def write_failure(
    entries: Iterable[Entry], error: Exception, definition: EvaluationSet, args: EvaluationArguments
) -> None:
    """Write the error into the rows of entries without figures."""
    try:
        results = definition.results(args)
    except (ConfigError, DataError):
        return  # the files cannot be written, or hold other results, which are kept
    for entry in entries:
        if not results.holds(entry):
            results.add(entry.row(str(error)), None)
    results.write()


def find_leakage(
    dataset: Dataset, train_data: Sequence[str], data_args: DataArguments, processes: PartialState
) -> Leakage:
    """Return the overlap of the evaluation data with `train_data`, which one process computes and broadcasts."""
    trained_on = open_rows(train_data, data_args)
    shared = [leakage(trained_on, iterate_comparisons(dataset)) if processes.is_main_process else None]
    [result] = broadcast_object_list(shared)
    logger.info("Leakage: %s", verdict(result))
    return result


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


def watch(
    model_dirs: Sequence[str],
    pattern: str,
    *,
    timeout: float,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Path]:
    """Yield every complete checkpoint below `model_dirs`, once, until all the trainings have finished.

    A folder may not exist yet; one that is itself a checkpoint counts as finished. After `timeout` seconds without a
    new checkpoint, not counting the time of evaluations, it ends with a warning. All ranks get the same checkpoints in
    the same order: the first searches, and broadcasts.
    """
    main = PartialState().is_main_process
    done: set[Path] = set()
    since = clock()
    while True:
        # First whether the trainings have finished: by then their last checkpoints are complete.
        look = (all(map(_finished, model_dirs)), _next(model_dirs, pattern, done), clock() - since) if main else None
        [(finished, folder, waited)] = broadcast_object_list([look])
        if folder is not None:
            done.add(folder)
            yield folder
            since = clock()
        elif finished:
            return
        elif waited >= timeout:
            logger.warning("No new checkpoint for %g minutes in %s: waiting no longer", timeout / 60, model_dirs)
            return
        else:
            wait(INTERVAL)


def _next(model_dirs: Sequence[str], pattern: str, done: set[Path]) -> Path | None:
    """Return the first complete checkpoint not in `done`, as the folders are now: a training may delete some."""
    for model_dir in model_dirs:
        for folder in find_checkpoints(model_dir, pattern) or [Path(model_dir)]:
            if folder not in done and (folder / COMPLETE).is_file():
                return folder
    return None


def _finished(model_dir: str) -> bool:
    return is_finished(model_dir) or Path(model_dir, COMPLETE).is_file()
