"""`vlmrm eval` and eval_rm.py: evaluate every checkpoint of every training on one data set, a row of the table each.

With `watch`, checkpoints of running trainings are evaluated as soon as each is complete.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset

from vlmrm.config import Configuration, parse
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import (
    data_fingerprint,
    iterate_comparisons,
    iterate_readable,
    load_comparisons,
    load_train_and_eval,
)
from vlmrm.data.tables import name_tables
from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.arguments import EvaluationArguments, check_data_keys
from vlmrm.evaluation.choosing import Criterion
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.evaluate import evaluate_entry, opened
from vlmrm.evaluation.keeping import SweepResult, conclude
from vlmrm.evaluation.leakage import Leakage, leakage, open_rows, verdict
from vlmrm.evaluation.public import Benchmark, benchmark, load_benchmark
from vlmrm.evaluation.results import Results, beside_published, describe, write_rewardbench
from vlmrm.evaluation.scorers import scorer_entries
from vlmrm.evaluation.scorers.checkpoint import CheckpointEntry
from vlmrm.files import exclusive_lock
from vlmrm.logs import start_log
from vlmrm.measures.pairs import check_columns
from vlmrm.modeling.manifest import COMPLETE, find_checkpoints, is_finished

logger = logging.getLogger("vlmrm")
INTERVAL = 15.0  # seconds between two searches for new checkpoints


def sweep(config: Configuration = (), /, **keys: Any) -> SweepResult:
    """Evaluate every checkpoint that has no row in the results yet, and choose the best, as `vlmrm eval` does.

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
    check_data_keys(args, data_args)
    log_path = start_log("eval")
    processes = launched()
    with sole_sweep(Path(args.output_file), processes):
        return run_sweep(args, data_args, processes, log_path)


@contextmanager
def sole_sweep(csv: Path, processes: PartialState) -> Generator[None]:
    """Hold the lock of the results in the first process of this sweep, and tell the others if it is taken.

    Raises:
        ConfigError: on every process, when another sweep is writing them.
    """
    with ExitStack() as held:
        refused = None
        try:
            if processes.is_main_process:
                refusal = f"{csv} is being written by another sweep: wait for its end, or choose another output_file."
                held.enter_context(exclusive_lock(csv.with_name(f"{csv.name}.lock"), refusal))
        except ConfigError as error:
            refused = str(error)
        [refused] = broadcast_object_list([refused])
        if refused is not None:
            raise ConfigError(refused)
        yield


def run_sweep(
    args: EvaluationArguments, data_args: DataArguments, processes: PartialState, log_path: Path | None
) -> SweepResult:
    """Evaluate with parsed arguments, with the results locked."""
    public = None if args.benchmark is None else benchmark(args.benchmark)
    if public is None and not data_args.dataset_path:
        raise ConfigError("dataset_path is missing: give the preferences to evaluate on, or a benchmark by name.")
    if public is not None:
        args.group_by = [*dict.fromkeys([*args.group_by, *public.by])]
    entries = entries_to_evaluate(args)
    try:
        dataset = open_data(public, data_args)
        if args.group_by:
            check_columns(iterate_readable(dataset), args.group_by)
    except (DataError, ConfigError) as error:
        if processes.is_main_process and not args.watch:
            write_failure(entries, error, args, data_args)
        raise
    results = Results(Path(args.output_file), settings(args, data_args))
    leaked = find_leakage(dataset, args.train_data, data_args, processes) if args.train_data else None
    results.leakage = None if leaked is None else leaked.block()
    count = f"{len(entries)} entries" if isinstance(entries, list) else "checkpoints as they come"
    logger.info("Evaluating %s on %d comparisons; log: %s", count, len(dataset), log_path)
    # Images are opened and processed for the first checkpoint and kept for the others.
    with TemporaryDirectory(prefix="vlmrm-images-") as images:
        run = SweepRun(args, data_args, processes, Path(images), results.settings["data"], leaked)
        looked_at, stopped = evaluate_all(entries, dataset, run, results)
    return conclude(results, looked_at, args, main=processes.is_main_process, stopped=stopped)


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
    folders = [folder for model_dir in args.model_dirs for folder in checkpoints_of(model_dir, args)]
    return [*map(CheckpointEntry, folders), *scorer_entries(args.scorer)]


def evaluate_all(
    entries: Iterable[Entry], dataset: Dataset, run: SweepRun, results: Results
) -> tuple[list[Entry], bool]:
    """Evaluate the entries that the results lack; return all entries, and whether Ctrl-C ended a watch."""
    criterion = Criterion(run.args.metric_for_best, run.args.one_standard_error)
    looked_at: list[Entry] = []
    try:
        for entry in entries:
            looked_at.append(entry)
            if results.holds(entry):
                logger.info("%s: already in %s", entry.path, results.csv)
                continue
            started = time.perf_counter()
            with opened(entry, run) as scorer:
                row, frame = evaluate_entry(entry, scorer, dataset, run)
            row["seconds"] = round(time.perf_counter() - started, 3)
            results.add(row, frame)
            results.best = criterion.best(results.rows)
            if run.processes.is_main_process:
                if frame is not None:
                    write_rewardbench(results.csv.with_suffix(".rewardbench"), row, frame)
                results.write()
            logger.info("%s: %s", entry.path, describe(row))
            if run.args.benchmark is not None and not row["error"]:
                logger.info("%s", beside_published(run.args.benchmark, row))
    except KeyboardInterrupt:
        if not run.args.watch:
            raise
        logger.warning("Stopped watching")
        return looked_at, True
    return looked_at, False


def open_data(public: Benchmark | None, data_args: DataArguments) -> Any:
    """Return the comparisons to score: a public benchmark's, or those of dataset_path.

    With `eval_fraction` these are the rows that a training of the same dataset_path and split_seed holds out.
    """
    if public is not None:
        return load_benchmark(public.name, next(iter(data_args.dataset_path), None), data_args)
    if data_args.eval_fraction:
        return load_train_and_eval(data_args)[1]
    return load_comparisons(
        data_args.dataset_path,
        arguments=data_args,
        split=data_args.dataset_split,
        weights=data_args.dataset_weights,
        limit=data_args.max_eval_samples,
    )


def write_failure(
    entries: Iterable[Entry], error: Exception, args: EvaluationArguments, data_args: DataArguments
) -> None:
    """Write the error into the rows of entries without figures."""
    try:
        results = Results(Path(args.output_file), settings(args, data_args))
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
    if not folders and ((folder / "config.json").exists() or (folder / "adapter_config.json").exists()):
        folders = [folder]
    if not folders:
        reason = "it does not exist" if not folder.is_dir() else f"nothing in it matches {args.checkpoint_pattern}"
        raise ConfigError(f"model_dirs: {folder} has no checkpoints ({reason}).")
    return folders


def settings(args: EvaluationArguments, data_args: DataArguments) -> dict[str, Any]:
    """Return the settings, other than the checkpoint, on which a row's figures depend."""
    keys = ("dtype", "attn_implementation", "base_model_path", "batching", "benchmark", "group_by")
    keys += ("interventions", "intervention_sample")
    hub = [] if args.benchmark is None else [benchmark(args.benchmark).source.hub]
    return {
        "data": data_fingerprint(data_args.dataset_path or hub),
        "train_data": data_fingerprint(args.train_data) if args.train_data else None,
        **{k: getattr(args, k) for k in keys},
        **({"scorer_drops_media": True} if args.scorer_drops_media else {}),
        "reading": asdict(data_args),
    }


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
