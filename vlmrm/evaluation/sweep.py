"""`vlmrm eval` / eval_rm.py: every checkpoint of every training over one data set, one table row each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from vlmrm.batching import Batcher, ComparisonCollator
from vlmrm.config import parse
from vlmrm.data.arguments import DataArguments
from vlmrm.data.fingerprint import data_fingerprint
from vlmrm.data.sources import load_comparisons
from vlmrm.errors import ConfigError, DataError, VlmrmError
from vlmrm.evaluation.ablations import blank_image
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.evaluation.metrics import accuracy_half_ties, summary, summary_by_category
from vlmrm.logs import start_log
from vlmrm.modeling import LoadedReward, batcher_for, find_checkpoints, load_checkpoint
from vlmrm.rendering import MediaLimits, Renderer

logger = logging.getLogger("vlmrm")

COLUMNS = ["model", "checkpoint", "preference_accuracy", "average_margin", "margin_std", "sample_count"]


@dataclass(frozen=True)
class SweepResult:
    """The table's rows, in the order evaluated, and where the best one is."""

    rows: list[dict[str, Any]]
    csv: Path

    @property
    def best(self) -> dict[str, Any] | None:
        scored = [row for row in self.rows if not row.get("error")]
        return max(scored, key=lambda row: row["preference_accuracy"], default=None)


def sweep(argv: Sequence[str]) -> SweepResult:
    """Evaluates every checkpoint that has no row in the results yet.

    Raises:
        ConfigError: when there is nothing to evaluate, or the results are of other data or settings.
        DataError: when the data cannot be read. A checkpoint that cannot be is a row with its error.
    """
    args, data_args = parse((EvaluationArguments, DataArguments), argv, "eval_rm.py")
    log_path = start_log("eval")
    if not data_args.dataset_path:
        raise ConfigError("dataset_path is missing: give the preferences to evaluate on.")
    checkpoints = [found for model_dir in args.model_dirs for found in checkpoints_of(model_dir, args)]
    dataset: Any = load_comparisons(
        data_args.dataset_path,
        arguments=data_args,
        split=data_args.dataset_split,
        weights=data_args.dataset_weights,
        limit=data_args.max_eval_samples,
    )
    results = Results(Path(args.output_file), settings(args, data_args))
    logger.info("Evaluating %d checkpoints on %d comparisons; log: %s", len(checkpoints), len(dataset), log_path)
    for folder in checkpoints:
        if str(folder) in results.done():
            logger.info("%s: already in %s", folder, args.output_file)
            continue
        row = evaluate_checkpoint(folder, dataset, args, data_args)
        results.add(row)
        logger.info("%s: %s", folder, describe(row))
    return SweepResult(results.rows, results.csv)


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


def evaluate_checkpoint(folder: Path, dataset, args: EvaluationArguments, data_args: DataArguments) -> dict[str, Any]:
    """One row of the table. What is wrong with a checkpoint is said in its row, and the sweep goes on."""
    row: dict[str, Any] = {"model": str(folder.parent), "checkpoint": folder.name, "path": str(folder), "error": None}
    started = time.perf_counter()
    try:
        loaded = load_checkpoint(
            folder,
            dtype=args.dtype,
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            base_model_path=args.base_model_path,
        )
        row |= measure(loaded, dataset, args, data_args, folder.name)
    except (DataError, ConfigError):
        raise  # the data's fault: every other checkpoint would meet it too
    except (VlmrmError, torch.OutOfMemoryError) as error:
        row["error"] = " ".join(str(error).split())
    row["seconds"] = round(time.perf_counter() - started, 3)
    return row


def measure(
    loaded: LoadedReward, dataset, args: EvaluationArguments, data_args: DataArguments, name: str
) -> dict[str, Any]:
    """The figures of one model on one data set."""
    collator = collator_for(loaded, batcher_for(loaded.model, loaded.processor, args.batching), data_args)
    options: dict[str, Any] = {"batch_size": args.eval_batch_size, "num_workers": args.dataloader_num_workers}
    result = evaluate(loaded.model, collator, dataset, description=name, **options)
    pairs = result.pairs()
    if not len(pairs.chosen):
        raise DataError(f"none of the {len(dataset)} rows could be scored: the first was {result.dropped[0]}.")
    row = {**summary(pairs), "categories": summary_by_category(pairs), "dropped_rows": len(result.dropped)}
    if args.blank_images:
        blank = evaluate(loaded.model, collator, dataset, change=blank_image, description=f"{name} blank", **options)
        row["blank_image_accuracy"] = accuracy_half_ties(blank.pairs().margins)
    return row


def collator_for(loaded: LoadedReward, batcher: Batcher, data_args: DataArguments) -> ComparisonCollator:
    """Rows as this model was trained to see them; pixel limits of the data keys win where they are given."""
    limits = MediaLimits(
        data_args.min_pixels or loaded.info.get("min_pixels"),
        data_args.max_pixels or loaded.info.get("max_pixels"),
        data_args.video_fps,
        data_args.video_max_frames,
    )
    return ComparisonCollator(
        Renderer(loaded.processor, limits),
        batcher,
        max_seq_length=data_args.max_seq_length or loaded.model.config.get_text_config().max_position_embeddings,
        overlong=data_args.overlong,
        bad_rows=data_args.bad_rows,
    )


def settings(args: EvaluationArguments, data_args: DataArguments) -> dict[str, Any]:
    """What a row's figures depend on besides the checkpoint."""
    keys = ("dtype", "attn_implementation", "base_model_path", "batching", "blank_images")
    return {
        "data": data_fingerprint(data_args.dataset_path),
        **{k: getattr(args, k) for k in keys},
        "reading": asdict(data_args),
    }


class Results:
    """The table (.csv) and its details (.json), written whole and atomically after every checkpoint."""

    def __init__(self, csv: Path, settings: dict[str, Any]):
        self.csv, self.json = csv, csv.with_suffix(".json")
        self.settings = settings
        self.rows: list[dict[str, Any]] = []
        if self.json.exists():
            self._continue()

    def _continue(self) -> None:
        try:
            saved = json.loads(self.json.read_text(encoding="utf-8"))
            same = digest(saved["settings"]) == digest(self.settings)
            self.rows = saved["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.json} is not a results file of this program: choose another output_file."
            ) from error
        if not same:
            raise ConfigError(f"{self.json} holds results of other data or settings: choose another output_file.")

    def done(self) -> set[str]:
        """Paths of the checkpoints with figures; those that failed are tried again."""
        return {row["path"] for row in self.rows if not row["error"]}

    def add(self, row: dict[str, Any]) -> None:
        self.rows = [other for other in self.rows if other["path"] != row["path"]] + [row]
        self.csv.parent.mkdir(parents=True, exist_ok=True)
        details = {"settings": self.settings, "results": self.rows}
        replace_file(self.json, json.dumps(details, indent=2, default=str) + "\n")
        replace_file(self.csv, table(self.rows).to_csv(index=False))


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One line a checkpoint, one `accuracy/CATEGORY` column a category."""
    flat = []
    for row in rows:
        line = {key: value for key, value in row.items() if key not in ("categories", "path")}
        for name, figures in row.get("categories", {}).items():
            line[f"accuracy/{name}"] = figures["preference_accuracy"]
        flat.append(line)
    frame = pd.DataFrame(flat)
    return frame.reindex(columns=[*COLUMNS, *[name for name in frame.columns if name not in COLUMNS]])


def describe(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    blank = f", with blank images {row['blank_image_accuracy']:.3f}" if "blank_image_accuracy" in row else ""
    return f"accuracy {row['preference_accuracy']:.3f}{blank}, margin {row['average_margin']:.3f}"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def replace_file(path: Path, text: str) -> None:
    """Writes all of `text` or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
