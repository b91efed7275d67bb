"""vlmrm's own trainings of a 3B, with their loader and optimizer: seconds of a step, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import runs
from benchmarks.gpu.models import checkpoint
from benchmarks.gpu.running import Run, needed
from benchmarks.harness import Row, row
from benchmarks.shapes import LARGEST_SIDE
from vlmrm.training import train
from vlmrm.training.trainer import ComparisonTrainer

BATCH, STEPS = 4, 10
FIRST = 2  # steps that are not timed: they make what the others find
CASES: dict[str, dict[str, Any]] = {
    "lora": {"use_peft": True},
    "qlora": {"use_peft": True, "load_in_4bit": True},
    "full, adamw_torch_fused": {"optim": "adamw_torch_fused"},
    "full, adamw_bnb_8bit": {"optim": "adamw_bnb_8bit"},
    "full, paged_adamw_8bit": {"optim": "paged_adamw_8bit"},
}


def training(run: Run) -> None:
    """Train for ten steps of four pairs in each of the ways, without saving."""
    for case, keys in CASES.items():
        run.attempt(case, partial(rows, run, case, keys))


def rows(run: Run, case: str, keys: dict[str, Any]) -> Iterator[Row]:
    """Yield the seconds of a step of a training, and its memory."""
    if "load_in_4bit" in keys or "8bit" in keys.get("optim", ""):
        needed("bitsandbytes")
    base = checkpoint(run.scratch, "3b", run.device, run.tiny)
    data = pictures(run.scratch, BATCH * STEPS)
    options = {"per_device_train_batch_size": BATCH, "max_steps": 3 if run.tiny else STEPS, "logging_steps": 1}
    options |= {"max_pixels": LARGEST_SIDE**2, "gradient_checkpointing": True, "attn_implementation": "auto"}
    options |= {"use_cpu": not run.cuda, "bf16": run.cuda, "dataloader_num_workers": 0 if run.tiny else 4}
    ends: list[float] = []

    def ended(*_: Any) -> None:
        if run.cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    counted: dict[str, Any] = {}

    def count(trainer: ComparisonTrainer, folder: Path) -> None:
        counted.update(counts(trainer.model))

    hook = register_optimizer_step_post_hook(ended)
    try:
        # Without saving: a disk's time is not of interest.
        with runs.workplace() as folder, patch.object(ComparisonTrainer, "save_final", count):
            train(runs.training_words(base, data, folder / "training", **{**options, **keys}))
    finally:
        hook.remove()
    peak = torch.cuda.max_memory_allocated() / 2**30 if run.cuda else None
    first = 1 if run.tiny else FIRST
    seconds = [later - earlier for earlier, later in zip(ends[first - 1 :], ends[first:], strict=False)]
    line = row(case, statistics.median(seconds), "s a step", pairs_per_second=BATCH / statistics.median(seconds))
    yield line | {"lowest": min(seconds), "highest": max(seconds), "peak_gib": peak} | counted


def counts(model: Any) -> dict[str, Any]:
    """Return the millions of weights that are trained, and how many tensors are in four bits inside and outside the
    language model."""
    weights = list(model.named_parameters())
    four_bits = [name for name, weight in weights if type(weight).__name__ == "Params4bit"]
    in_text = sum(".language_model." in name for name in four_bits)
    return {
        "trained_millions": sum(weight.numel() for _, weight in weights if weight.requires_grad) / 1e6,
        "four_bit_text": in_text,
        "four_bit_outside": len(four_bits) - in_text,
    }


def pictures(scratch: Path, count: int) -> Path:
    """Return a file of preference pairs about pictures, written on first use."""
    folder = scratch / f"pairs-{count}"
    path = folder / "pairs.jsonl"
    return path if path.is_file() else runs.picture_pairs(folder, count, pictures=count)
