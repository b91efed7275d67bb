"""What `auto` stands for: how much of a step is computed at once, and what of it twice, by the memory that is free."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vlmrm.batching.collator import branches_of
from vlmrm.files import size_text
from vlmrm.modeling.arguments import AUTO
from vlmrm.rendering import ProcessedMedia, Rendered
from vlmrm.training.arguments import RunArguments
from vlmrm.training.build import build_collator
from vlmrm.training.engines import LAYER_KEYS, set_checkpointing
from vlmrm.training.memory import estimate_memory, free_memory, planned_model
from vlmrm.training.survey import Survey

LEAST, MOST = 4096, 16_384  # tokens of a forward: with fewer a GPU waits for its host, more are no faster
EASY = 0.02  # share of the free memory: nothing is traced for a model that takes less
USED = 0.9  # of the free memory; the rest is for buffers inside kernels, and gaps between tensors
SAMPLE = 32  # rows of which the densest are traced
# Which layers are computed twice, the fastest first: every so many-th of them.
TWICE = {0: "no layer", 4: "every fourth layer", 2: "every second layer", 1: "every layer"}


@dataclass(frozen=True)
class Fit:
    """A choice: every so many-th layer is computed twice (0: none), so many tokens and patches at once, and why."""

    every: int
    tokens: int
    why: str

    def apply(self, run: RunArguments) -> None:
        """Set the keys that are `auto`."""
        if run.training.gradient_checkpointing == AUTO:
            set_checkpointing(run.training, self.every)
        if run.model.max_tokens_per_batch == AUTO:
            run.model.max_tokens_per_batch = self.tokens


def fit(run: RunArguments, ranks: int, processor: Any, dataset: Any, rows: Survey) -> Fit | None:
    """Choose what `auto` stands for in a run of `ranks` processes by the surveyed `rows`; None where nothing is."""
    if AUTO not in (run.training.gradient_checkpointing, run.model.max_tokens_per_batch):
        return None
    free, few = free_memory(run), estimate_memory(run, ranks).total
    if few < EASY * free:
        why = f"all but activations take {size_text(few)} of {size_text(free)} free"
        return Fit(0, MOST, f"no layer is computed twice, and at most {MOST:,} tokens and patches at once: {why}")
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))  # of models that are only traced
    try:
        return fit_into(free, run, ranks, processor, dataset, rows)
    finally:
        logging.disable(disabled)


def fit_into(free: float, run: RunArguments, ranks: int, processor: Any, dataset: Any, rows: Survey) -> Fit:
    """Choose by `free` bytes: the fewest layers twice with which a forward can hold `LEAST` tokens, or a whole step.

    Activations grow with the tokens of a forward, and with the layers that keep theirs: they are traced for a sample,
    with all layers and with none.
    """
    written, limit = run.training.gradient_checkpointing, run.model.max_tokens_per_batch
    sample = Sample.of(run, processor, dataset, rows)
    batch = sample.row * run.training.train_batch_size
    enough = min(batch, LEAST if limit == AUTO else float(limit or math.inf) / sample.size)

    @cache
    def needed(every: int) -> tuple[int, float]:
        """Return the bytes beside activations, and those of activations a token."""
        if written == AUTO:
            set_checkpointing(run.training, every)
        memory = estimate_memory(run, ranks, processor, dataset, rows, sample.inputs)
        run.training.gradient_checkpointing = written
        return memory.total - memory.activations, memory.activations / sample.tokens or math.inf

    every = beside = each = tokens = 0
    for every in (TWICE if LAYER_KEYS else (0, 1)) if written == AUTO else [int(written)]:
        beside, each = needed(min(every, 1))
        if every > 1:
            each += (needed(0)[1] - each) * (1 - 1 / every)
        if (tokens := (USED * free - beside) / each) >= enough:
            break
    most = min(max(tokens, sample.row), MOST)
    parts = math.ceil(batch / most)  # about even ones, with room for a batch that is longer than others
    at_once = int(sample.size * (most if parts == 1 else min(most, 1.1 * batch / parts)))
    chosen = [f"{TWICE[every]} is computed twice"] * (written == AUTO)
    chosen += [f"at most {at_once:,} tokens and patches are computed at once"] * (limit == AUTO)
    rest = f"{size_text(each)} a token" if each < math.inf else "what cannot be traced"
    why = f"of {size_text(free)} free all but activations take {size_text(beside)}, these {rest}"
    return Fit(every, at_once, f"{' and '.join(chosen)}: {why}")


@dataclass(frozen=True)
class Sample:
    """The inputs of a forward, its tokens, tokens and patches by each token, and tokens of a row."""

    inputs: Mapping[str, Any]
    tokens: int
    size: float
    row: float

    @classmethod
    def of(cls, run: RunArguments, processor: Any, dataset: Any, rows: Survey) -> Sample:
        """Return about `LEAST` tokens of the surveyed rows, those with the fewest patches by token first.

        A limit of tokens and patches admits more tokens where there are few patches, and tokens take the memory.
        """
        collator = build_collator(run, processor, planned_model(run, torch.bfloat16)[0], dataset)

        def tokens_in(rendered: Sequence[Rendered]) -> int:
            return collator.batcher(rendered)["input_ids"].numel()

        units = []
        for position in rows.positions[:: -(-len(rows.positions) // SAMPLE)]:
            cache: dict[str, ProcessedMedia] = {}
            talks = dataset[position]["comparison"].conversations()
            units.append(branches_of([collator.fit(talk, cache) for talk in talks]))
        counts = {id(unit): tokens_in(unit) for unit in units}
        units.sort(key=lambda unit: collator.batcher.size(unit) / counts[id(unit)])
        chosen: list[Rendered] = []
        for unit in units:
            if not chosen or tokens_in(chosen) < LEAST:
                chosen += unit
        inputs = collator.batcher(chosen)
        tokens = inputs["input_ids"].numel()
        return cls(inputs, tokens, collator.batcher.size(chosen) / tokens, sum(counts.values()) / len(units))
