"""A checkpoint of a training as an entry of the table: rendered, batched and scored by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlmrm.batching import ComparisonCollator
from vlmrm.engine import Engine, ScoredRow
from vlmrm.evaluation.choosing import step_of
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import limits_of
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.modeling import LoadedReward, batcher_for, load_checkpoint, load_weights, sequence_limit, template_hash
from vlmrm.modeling.attention import attention_of
from vlmrm.modeling.manifest import checkpoint_digest, hub_snapshot
from vlmrm.rendering import MediaLimits, Renderer


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
            loaded = load_checkpoint(
                self.folder,
                dtype=args.dtype,
                attn_implementation=args.attn_implementation,
                trust_remote_code=args.trust_remote_code,
                base_model_path=args.base_model_path,
                batching=args.batching,
                check_sight=args.check_sight,
                check_files=args.check_files,
            )
            limits = limits_of(args.interventions, compares=False)
            opened = OpenCheckpoint(loaded, engine_for(loaded, run, limits), run, limits)
        if args.vision_cache_dir is not None:
            loaded.model.requires_grad_(False)
            loaded.model.use_vision_cache(args.vision_cache_dir, args.vision_cache_gb)
        return opened


class HubEntry(CheckpointEntry):
    """A checkpoint of ours on the hub, named by its id."""

    def __init__(self, hub_id: str):
        super().__init__(Path(hub_id))

    def digest(self) -> str:
        return checkpoint_digest(hub_snapshot(self.path))

    def open(self, run: SweepRun) -> OpenCheckpoint:
        return CheckpointEntry(hub_snapshot(self.path)).open(run)


@dataclass
class OpenCheckpoint:
    """A loaded checkpoint and the engine that scores with it."""

    loaded: LoadedReward
    engine: Engine
    run: SweepRun
    limits: Mapping[str, str]

    @property
    def interventions(self) -> Mapping[str, Any]:
        return self.engine.interventions

    def rows(self, dataset: Any, *, batch_size: int, num_workers: int = 0) -> Iterator[ScoredRow]:
        return self.engine.rows(dataset, batch_size=batch_size, num_workers=num_workers)

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
    """Return the engine of a model, which is shown rows as in its training unless the data keys say otherwise."""
    args, data_args = run.args, run.data_args.as_trained(loaded.info)
    media_limits, outputs = MediaLimits.of(data_args), loaded.model.outputs
    store = run.store(loaded.processor, media_limits)
    collator = ComparisonCollator(
        Renderer(loaded.processor, media_limits, store, branches=outputs.branches),
        batcher_for(loaded.model, loaded.processor, args.batching),
        max_seq_length=sequence_limit(loaded.model.config, data_args.max_seq_length),
        max_tokens_per_batch=args.max_tokens_per_batch,
        overlong=data_args.overlong,
        bad_rows=data_args.bad_rows,
        interventions={name: INTERVENTIONS[name] for name in args.interventions if name not in limits},
        outputs=outputs,
    )
    return Engine(loaded.model, collator)
