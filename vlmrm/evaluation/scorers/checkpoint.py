"""A checkpoint of a training as an entry of the table: rendered, batched and scored by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from vlmrm.batching import ComparisonCollator
from vlmrm.engine import Engine, ScoredRow
from vlmrm.errors import CheckpointError, first_line
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.choosing import step_of
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import limits_of
from vlmrm.evaluation.scorers.kept_batches import KeptBatches
from vlmrm.libraries import hub_answers
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.modeling import LoadedReward, batcher_for, load_checkpoint, load_weights, sequence_limit, template_hash
from vlmrm.modeling.attention import attention_of
from vlmrm.modeling.manifest import checkpoint_digest
from vlmrm.rendering import MediaLimits, Renderer

KEPT_BYTES = 2 << 30  # of batches in memory


class CheckpointEntry(Entry):
    """A folder that training wrote."""

    def __init__(self, folder: Path):
        super().__init__(str(folder.parent), folder.name, str(folder))
        self.folder = folder

    @property
    def step(self) -> int | None:
        return step_of(self.folder.name)

    def digest(self) -> str:
        return checkpoint_digest(self.folder)

    def open(self, run: SweepRun) -> OpenCheckpoint:
        """Put its weights into the model of the checkpoint before, or open it by itself where they differ in more."""
        args = run.args
        before: OpenCheckpoint | None = run.closed.pop() if run.closed else None
        loaded = None if before is None else load_weights(before.loaded, self.folder, check_files=args.check_files)
        if before is not None and loaded is not None:
            opened = replace(before, loaded=loaded)
        else:
            before = None  # its memory is free before another model is opened
            loaded = self._load(args)
            limits = limits_of(args.interventions, compares=False)
            opened = OpenCheckpoint(loaded, engine_for(loaded, run, limits), run, limits)
        if args.vision_cache_dir is not None:
            loaded.model.requires_grad_(False)
            loaded.model.use_vision_cache(args.vision_cache_dir, args.vision_cache_gb)
        return opened

    def _load(self, args: EvaluationArguments) -> LoadedReward:
        return load_checkpoint(
            self.folder,
            dtype=args.dtype,
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            base_model_path=args.base_model_path,
            batching=args.batching,
            check_sight=args.check_sight,
            check_files=args.check_files,
        )


class HubEntry(CheckpointEntry):
    """A checkpoint of ours on the hub, named by its id."""

    def __init__(self, hub_id: str):
        super().__init__(Path(hub_id))

    def digest(self) -> str:
        return checkpoint_digest(snapshot(self.path))

    def open(self, run: SweepRun) -> OpenCheckpoint:
        return CheckpointEntry(snapshot(self.path)).open(run)


def snapshot(hub_id: str) -> Path:
    """Return the folder of all files of a repository, which are downloaded once."""
    try:
        return Path(snapshot_download(hub_id, local_files_only=not hub_answers()))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{hub_id} is no folder here, and cannot be downloaded from the hub ({first_line(error)}): check the name."
        ) from error


@dataclass
class OpenCheckpoint:
    """A loaded checkpoint and the engine that scores with it."""

    loaded: LoadedReward
    engine: Engine
    run: SweepRun
    limits: Mapping[str, str]
    kept: KeptBatches = field(default_factory=lambda: KeptBatches(KEPT_BYTES))

    @property
    def interventions(self) -> Mapping[str, Any]:
        return self.engine.interventions

    @torch.inference_mode()
    def rows(self, dataset: Any, *, batch_size: int, num_workers: int = 0) -> Iterator[ScoredRow]:
        collate = partial(self.engine.batches, batch_size=batch_size, num_workers=num_workers)
        for batch in self.kept.batches(dataset, batch_size, collate):
            yield from self.engine.score_batch(batch)

    def origin(self) -> Origin:
        model = self.loaded.model
        return {
            "weights": self.loaded.digest,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": attention_of(model),
            "chat_template_sha256": template_hash(self.loaded.processor),
            "checkpoint": self.loaded.info.get("provenance", {}),
        }

    def close(self) -> None:
        """Leave it to the next checkpoint of the run."""
        self.run.closed[:] = [self]


def engine_for(loaded: LoadedReward, run: SweepRun, limits: Mapping[str, str]) -> Engine:
    """Return the engine of a model, which is shown rows as in its training unless the data keys say otherwise.

    It scores the interventions of the sweep but those of `limits`.
    """
    args, data_args = run.args, run.data_args.as_trained(loaded.info)
    media_limits = MediaLimits.of(data_args)
    collator = ComparisonCollator(
        Renderer(loaded.processor, media_limits, run.store(loaded.processor, media_limits)),
        batcher_for(loaded.model, loaded.processor, args.batching),
        max_seq_length=sequence_limit(loaded.model.config, data_args.max_seq_length),
        max_tokens_per_batch=args.max_tokens_per_batch,
        overlong=data_args.overlong,
        bad_rows=data_args.bad_rows,
        interventions={name: INTERVENTIONS[name] for name in args.interventions if name not in limits},
    )
    return Engine(loaded.model, collator)
