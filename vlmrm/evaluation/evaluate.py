"""Evaluate one checkpoint: score every branch of the data, and return its row of the table and its scored pairs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from vlmrm.batching import ComparisonCollator
from vlmrm.conversation import Comparison
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import iterate_comparisons
from vlmrm.engine import Engine, ScoredRow
from vlmrm.errors import CheckpointError, DataError, RowError, ScoreError, VlmrmError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.choosing import step_of
from vlmrm.evaluation.leakage import Leakage
from vlmrm.evaluation.public import benchmark
from vlmrm.evaluation.results import table_figures
from vlmrm.evaluation.schema import Provenance, Row, Statistics
from vlmrm.logs import progress
from vlmrm.measures.analysis import analyse
from vlmrm.measures.intervals import DRAWS, SEED
from vlmrm.measures.interventions import BLOCKS, INTERVENTIONS, Traits, donor_of, traits_of
from vlmrm.measures.pairs import ScoredComparisons, scored_frame
from vlmrm.modeling import LoadedReward, batcher_for, load_checkpoint, provenance, sequence_limit, template_hash
from vlmrm.modeling.attention import attention_of
from vlmrm.rendering import MediaLimits, MediaStore, Renderer

IMAGES_LIMIT = 20 * 10**9  # bytes of processed images kept on disk during a sweep


class _Rows(Sequence[Comparison]):
    """The comparisons of some rows of a data set, read anew each time: images in them may be more than memory."""

    def __init__(self, dataset: Any, indices: list[int]):
        self._dataset = dataset.select(indices)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: Any) -> Any:
        return self._dataset[number]["comparison"]

    def __iter__(self) -> Iterator[Any]:
        return iterate_comparisons(self._dataset)


@dataclass
class _Share:
    """A rank's rows of a data set: every `ranks`-th block of `block` rows, so that neighbours stay together.

    A row has its `index` in the data set and, if `with_donors`, a `donor` (see `donor_of`), which depends on the data
    set alone, not on batches and ranks.
    """

    dataset: Any
    block: int
    rank: int
    ranks: int
    with_donors: bool

    def __post_init__(self):
        starts = range(self.rank * self.block, len(self.dataset), self.ranks * self.block)
        self._indices = [i for start in starts for i in range(start, min(start + self.block, len(self.dataset)))]
        self._traits: dict[int, Traits | None] = {}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        indices = [self._indices[number] for number in numbers]
        comparisons = self.dataset[indices]["comparison"]
        rows = [{"index": index, "comparison": c} for index, c in zip(indices, comparisons, strict=True)]
        if self.with_donors:
            first = min(indices) // BLOCKS[-1] * BLOCKS[-1]  # rows before it are in earlier blocks
            self._traits = {index: traits for index, traits in self._traits.items() if index >= first}
            self._traits |= {row["index"]: traits_of(row["comparison"]) for row in rows}
            for row in rows:
                row["donor"] = donor_of(row["comparison"], row["index"], self.dataset, self._traits)
        return rows


@dataclass(frozen=True)
class SweepRun:
    """The arguments and state that all evaluations of a sweep share.

    `images` is a folder for processed images, `data` the fingerprint of the evaluation data.
    """

    args: EvaluationArguments
    data_args: DataArguments
    processes: PartialState
    images: Path
    data: str
    leakage: Leakage | None = None

    def store(self, processor: Any, limits: MediaLimits) -> MediaStore:
        """Return the store of processed images, which checkpoints with an equal processor and limits share."""
        name = f"{processor.image_processor.to_json_string()} {limits}"
        # Each process has a folder of its own, which earlier checkpoints have begun to fill.
        left = IMAGES_LIMIT // self.processes.num_processes - sum(
            file.stat().st_size for file in self.images.iterdir()
        )
        return MediaStore(self.images, left // max(self.args.dataloader_num_workers, 1), name)


def row_of(folder: Path, error: str | None = None) -> Row:
    """Return a checkpoint's row before it has figures."""
    return {
        "model": str(folder.parent),
        "checkpoint": folder.name,
        "path": str(folder),
        "error": error,
        "seconds": 0.0,
    }


def evaluate_checkpoint(folder: Path, dataset, run: SweepRun) -> tuple[Row, pd.DataFrame | None]:
    """Return a checkpoint's row of the table and its scored pairs; of one that fails the row has the error."""
    row: dict[str, Any] = {**row_of(folder)}
    started = time.perf_counter()
    loaded, error = None, None
    try:
        loaded = load_checkpoint(
            folder,
            dtype=run.args.dtype,
            attn_implementation=run.args.attn_implementation,
            trust_remote_code=run.args.trust_remote_code,
            base_model_path=run.args.base_model_path,
            batching=run.args.batching,
            check_sight=run.args.check_sight,
            check_files=run.args.check_files,
        )
        if run.args.vision_cache_dir is not None:
            loaded.model.requires_grad_(False)
            loaded.model.use_vision_cache(run.args.vision_cache_dir, run.args.vision_cache_gb)
    except (CheckpointError, torch.OutOfMemoryError) as failure:
        error = _line(failure)
    # A rank that cannot load must not leave the others waiting for its scores.
    errors = [message for message in gather_object([error]) if message is not None]
    frame = None
    if loaded is not None and not errors:
        try:
            figures, frame = measure(loaded, dataset, run, folder)
            row |= figures
        except RowError:
            raise  # the data are at fault, for every checkpoint alike
        except (CheckpointError, DataError) as failure:
            row["error"] = str(failure)
        except torch.OutOfMemoryError as failure:
            row["error"] = f"{_line(failure)}: lower eval_batch_size, max_tokens_per_batch or max_pixels."
    else:
        row["error"] = errors[0]
    row["seconds"] = round(time.perf_counter() - started, 3)
    return cast(Row, row), frame


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def measure(loaded: LoadedReward, dataset, run: SweepRun, folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the figures of one model on one data set, and the scored pairs."""
    args, processes = run.args, run.processes
    result = evaluate(
        engine_for(loaded, run),
        dataset,
        batch_size=args.eval_batch_size,
        num_workers=args.dataloader_num_workers,
        rank=processes.process_index,
        ranks=processes.num_processes,
        description=folder.name,
    )
    if not result.comparisons:
        raise DataError(f"none of the {len(dataset)} rows could be scored: the first was {result.dropped[0]}.")
    frame = scored_frame(
        result, model=str(folder.parent), checkpoint=folder.name, step=step_of(folder.name), group_by=args.group_by
    )
    if run.leakage is not None:
        frame["by/leaked"] = np.where(frame["comparison_id"].isin(run.leakage.leaked), "yes", "no")
    statistics = cast(Statistics, analyse(frame))
    figures: dict[str, Any] = {**table_figures(statistics["overall"]), "dropped_rows": len(result.dropped)}
    if args.benchmark is not None:
        figures["benchmark"] = benchmark(args.benchmark).score(frame)
    return {**figures, "statistics": statistics, "provenance": provenance_of(loaded, run)}, frame


def provenance_of(loaded: LoadedReward, run: SweepRun) -> Provenance:
    """Return the provenance of one checkpoint's figures."""
    model = loaded.model
    made = provenance({})
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "git_commit": made["git_commit"],
        "versions": made["versions"],
        "data": run.data,
        "weights": loaded.digest,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "processes": run.processes.num_processes,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": attention_of(model),
        "chat_template_sha256": template_hash(loaded.processor),
        "bootstrap_draws": DRAWS,
        "bootstrap_seed": SEED,
        "checkpoint": loaded.info.get("provenance", {}),
    }


def engine_for(loaded: LoadedReward, run: SweepRun) -> Engine:
    """Return the engine of a model, with the pixel limits of its training unless the data keys set others."""
    args, data_args = run.args, run.data_args
    limits = MediaLimits(
        data_args.min_pixels or loaded.info.get("min_pixels"),
        data_args.max_pixels or loaded.info.get("max_pixels"),
        data_args.video_fps,
        data_args.video_max_frames,
    )
    collator = ComparisonCollator(
        Renderer(loaded.processor, limits, run.store(loaded.processor, limits)),
        batcher_for(loaded.model, loaded.processor, args.batching),
        max_seq_length=sequence_limit(loaded.model.config, data_args.max_seq_length),
        max_tokens_per_batch=args.max_tokens_per_batch,
        overlong=data_args.overlong,
        bad_rows=data_args.bad_rows,
        interventions={name: INTERVENTIONS[name] for name in args.interventions},
    )
    return Engine(loaded.model, collator)


def evaluate(
    engine: Engine,
    dataset,
    *,
    batch_size: int,
    num_workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    description: str = "scoring",
) -> ScoredComparisons:
    """Score every row of `dataset` (rows of `load_comparisons`) once, and beside it each intervention of the collator.

    Of several ranks each takes a share, and all get the whole result in the data set's order.

    Raises:
        OutOfMemoryError: on every rank, when one has no memory left.
        CheckpointError: on every rank, when a score is no finite number.
        VlmrmError: on every rank, when one has a row that it may not skip.
    """
    share = _Share(dataset, batch_size, rank, ranks, with_donors=bool(engine.collator.interventions))
    rows = engine.rows(share, batch_size=batch_size, num_workers=num_workers)
    scored: list[ScoredRow] = []
    failed: Exception | None = None
    try:
        for row in progress(rows, description, len(share), show=rank == 0):
            if isinstance(row.error, ScoreError):
                raise CheckpointError(f"{row.error}.")
            scored.append(row)
    except (torch.OutOfMemoryError, VlmrmError) as error:
        failed = error
    # A rank that cannot go on must not leave the others waiting for its scores.
    for failure in gather_object([failed]):
        if failure is not None:
            raise failure
    gathered = sorted(gather_object(scored), key=lambda row: row.index)
    kept = [row for row in gathered if row.error is None]
    return ScoredComparisons(
        _Rows(dataset, [row.index for row in kept]),
        scores=[row.scores for row in kept],
        altered=[row.altered for row in kept],
        dropped=[row.error for row in gathered if row.error is not None],
    )
