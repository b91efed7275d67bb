"""`vlmrm eval` / eval_rm.py: every checkpoint of every training over one data set, one table row each."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from vlmrm.batching import ComparisonCollator
from vlmrm.config import parse
from vlmrm.data.arguments import DataArguments
from vlmrm.data.fingerprint import data_fingerprint
from vlmrm.data.sources import load_comparisons
from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError, DataError
from vlmrm.evaluation.ablations import ABLATIONS
from vlmrm.evaluation.analysis import analyse
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.evaluation.frame import scored_frame
from vlmrm.evaluation.metrics import accuracy_half_ties, summary, summary_by_category
from vlmrm.evaluation.public import Benchmark, benchmark, load_benchmark
from vlmrm.evaluation.results import Results, beside_published, describe
from vlmrm.logs import start_log
from vlmrm.media_store import MediaStore
from vlmrm.modeling import LoadedReward, batcher_for, find_checkpoints, load_checkpoint, sequence_limit
from vlmrm.rendering import MediaLimits, Renderer

logger = logging.getLogger("vlmrm")

IMAGES_LIMIT = 20 * 10**9  # bytes of processed images kept on disk during a sweep


@dataclass(frozen=True)
class SweepResult:
    """The table's rows, in the order evaluated, and where the best one is."""

    rows: list[dict[str, Any]]
    csv: Path
    scores: Path  # every pair, as parquet

    @property
    def best(self) -> dict[str, Any] | None:
        scored = [row for row in self.rows if not row.get("error")]
        return max(scored, key=lambda row: row["preference_accuracy"], default=None)

    def reaches(self, accuracy: float) -> bool:
        return self.best is not None and self.best["preference_accuracy"] >= accuracy


@dataclass(frozen=True)
class Run:
    """What the evaluations of one sweep have in common. `images` is a folder for processed ones."""

    args: EvaluationArguments
    data_args: DataArguments
    processes: PartialState
    images: Path

    def store(self, processor: Any, limits: MediaLimits) -> MediaStore:
        """Processed images of the checkpoints before, of an equal processor and equal limits."""
        name = f"{processor.image_processor.to_json_string()} {limits}"
        # Each process has a folder of its own, which the checkpoints before have begun to fill.
        left = IMAGES_LIMIT // self.processes.num_processes - sum(
            file.stat().st_size for file in self.images.iterdir()
        )
        return MediaStore(self.images, left // max(self.args.dataloader_num_workers, 1), name)


def sweep(argv: Sequence[str]) -> SweepResult:
    """Evaluates every checkpoint that has no row in the results yet.

    Raises:
        ConfigError: when there is nothing to evaluate, or the results are of other data or settings.
        BelowThreshold: when every checkpoint is below `fail_under`.
        DataError: when the data cannot be read. A checkpoint that cannot be is a row with its error.
    """
    args, data_args = parse((EvaluationArguments, DataArguments), argv, "eval_rm.py")
    log_path = start_log("eval")
    processes = PartialState(cpu=not torch.accelerator.is_available())  # the launcher's ranks, each on its device
    public = None if args.benchmark is None else benchmark(args.benchmark)
    if public is None and not data_args.dataset_path:
        raise ConfigError("dataset_path is missing: give the preferences to evaluate on, or a benchmark by name.")
    checkpoints = [found for model_dir in args.model_dirs for found in checkpoints_of(model_dir, args)]
    dataset = open_data(public, data_args)
    if public is not None:
        args.group_by = [*dict.fromkeys([*args.group_by, *public.columns])]
    results = Results(Path(args.output_file), settings(args, data_args))
    logger.info("Evaluating %d checkpoints on %d comparisons; log: %s", len(checkpoints), len(dataset), log_path)
    # Images are opened and processed for the first checkpoint and kept for the others.
    with TemporaryDirectory(prefix="vlmrm-images-") as images:
        run = Run(args, data_args, processes, Path(images))
        for folder in checkpoints:
            if str(folder) in results.done():
                logger.info("%s: already in %s", folder, args.output_file)
                continue
            row, frame = evaluate_checkpoint(folder, dataset, run)
            results.add(row, frame, write=processes.is_main_process)
            logger.info("%s: %s", folder, describe(row))
            if public is not None and not row["error"]:
                logger.info("%s", beside_published(public.name, row))
    result = SweepResult(results.rows, results.csv, results.parquet)
    if args.fail_under is not None and not result.reaches(args.fail_under):
        raise BelowThreshold(f"no checkpoint reaches the accuracy {args.fail_under} of fail_under: see {results.csv}.")
    return result


def open_data(public: Benchmark | None, data_args: DataArguments) -> Any:
    """The comparisons to score: a public benchmark's, from the hub or the local copy at dataset_path, or one's own."""
    if public is not None:
        return load_benchmark(public.name, next(iter(data_args.dataset_path), None), data_args)
    return load_comparisons(
        data_args.dataset_path,
        arguments=data_args,
        split=data_args.dataset_split,
        weights=data_args.dataset_weights,
        limit=data_args.max_eval_samples,
    )


def checkpoints_of(model_dir: str, args: EvaluationArguments) -> list[Path]:
    """The checkpoints of one of `model_dirs`, in natural order; the folder itself where it is one."""
    folder = Path(model_dir)
    found = find_checkpoints(folder, args.checkpoint_pattern)
    if not found and ((folder / "config.json").exists() or (folder / "adapter_config.json").exists()):
        found = [folder]
    if not found:
        there = "it does not exist" if not folder.is_dir() else f"nothing in it matches {args.checkpoint_pattern}"
        raise ConfigError(f"model_dirs: {folder} has no checkpoints ({there}).")
    return found


def evaluate_checkpoint(folder: Path, dataset, run: Run) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """One row of the table and the pairs behind it. What is wrong with a checkpoint is said in its row."""
    row: dict[str, Any] = {"model": str(folder.parent), "checkpoint": folder.name, "path": str(folder), "error": None}
    started = time.perf_counter()
    loaded, error = None, None
    try:
        loaded = load_checkpoint(
            folder,
            dtype=run.args.dtype,
            attn_implementation=run.args.attn_implementation,
            trust_remote_code=run.args.trust_remote_code,
            base_model_path=run.args.base_model_path,
        )
        if run.args.vision_cache_dir is not None:
            loaded.model.requires_grad_(False)
            loaded.model.use_vision_cache(run.args.vision_cache_dir, run.args.vision_cache_gb)
    except (CheckpointError, torch.OutOfMemoryError) as failure:
        error = " ".join(str(failure).split())
    # A rank that cannot load must not leave the others waiting for its scores.
    errors = [each for each in gather_object([error]) if each is not None]
    frame = None
    if loaded is not None and not errors:
        figures, frame = measure(loaded, dataset, run, folder)
        row |= figures
    else:
        row["error"] = errors[0]
    row["seconds"] = round(time.perf_counter() - started, 3)
    return row, frame


def measure(loaded: LoadedReward, dataset, run: Run, folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The figures of one model on one data set, and the scored pairs."""
    args, processes = run.args, run.processes
    result = evaluate(
        loaded.model,
        collator_for(loaded, run),
        dataset,
        batch_size=args.eval_batch_size,
        num_workers=args.dataloader_num_workers,
        rank=processes.process_index,
        ranks=processes.num_processes,
        ablations={name: ABLATIONS[name] for name in args.ablations},
        description=folder.name,
    )
    pairs = result.pairs()
    if not len(pairs.chosen):
        raise DataError(f"none of the {len(dataset)} rows could be scored: the first was {result.dropped[0]}.")
    frame = scored_frame(
        result, model=str(folder.parent), checkpoint=folder.name, step=step_of(folder), group_by=args.group_by
    )
    figures = {**summary(pairs), "categories": summary_by_category(pairs), "dropped_rows": len(result.dropped)}
    not_finite = ~np.isfinite(frame[["chosen_score", "rejected_score"]]).all(axis=1)
    if not_finite.any():
        row_id = frame.loc[not_finite.idxmax(), "comparison_id"]
        return {"error": f"{int(not_finite.sum())} pairs have a score that is no number, first of {row_id}."}, frame
    for name in args.ablations:
        ablated = result.ablated_pairs(name)
        if len(ablated.margins):
            figures[f"{name}_accuracy"] = accuracy_half_ties(ablated.margins)
    if args.benchmark is not None:
        figures["benchmark"] = benchmark(args.benchmark).score(frame)
    return {**figures, "statistics": analyse(frame, args.group_by)}, frame


def step_of(folder: Path) -> int | None:
    """The training step in a checkpoint's name, such as checkpoint-500."""
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def collator_for(loaded: LoadedReward, run: Run) -> ComparisonCollator:
    """Rows as this model was trained to see them; pixel limits of the data keys win where they are given."""
    args, data_args = run.args, run.data_args
    limits = MediaLimits(
        data_args.min_pixels or loaded.info.get("min_pixels"),
        data_args.max_pixels or loaded.info.get("max_pixels"),
        data_args.video_fps,
        data_args.video_max_frames,
    )
    return ComparisonCollator(
        Renderer(loaded.processor, limits, run.store(loaded.processor, limits)),
        batcher_for(loaded.model, loaded.processor, args.batching),
        max_seq_length=sequence_limit(loaded.model, data_args.max_seq_length),
        max_tokens_per_batch=args.max_tokens_per_batch,
        overlong=data_args.overlong,
        bad_rows=data_args.bad_rows,
    )


def settings(args: EvaluationArguments, data_args: DataArguments) -> dict[str, Any]:
    """What a row's figures depend on besides the checkpoint."""
    keys = ("dtype", "attn_implementation", "base_model_path", "batching", "benchmark", "ablations", "group_by")
    return {
        "data": data_fingerprint(data_args.dataset_path),
        **{k: getattr(args, k) for k in keys},
        "reading": asdict(data_args),
    }
