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
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import runs
from benchmarks.gpu.models import checkpoint
from benchmarks.gpu.running import Run, needed
from benchmarks.harness import Row, Skipped, row
from vlmrm.training import train
from vlmrm.training.trainer import ComparisonTrainer

STEPS = 10
FIRST = 3  # steps that are not timed: they make what the others find
LORA: dict[str, Any] = {"use_peft": True}
FULL: dict[str, Any] = {"optim": "adamw_torch_fused"}
EAGER: dict[str, Any] = {"torch_compile": False}
SMALL, LARGE = 448, 896  # pixels of a side: images of 256 and of 1,024 tokens
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # pairs of a step, pixels, keys
    "lora, 4 pairs of 1,024": (4, LARGE, LORA),
    "lora, 16 pairs of 1,024": (16, LARGE, LORA),
    "lora, 4 pairs of 256": (4, SMALL, LORA),
    "lora, 32 pairs of 256": (32, SMALL, LORA),
    "lora, 4 pairs of 1,024, eager": (4, LARGE, LORA | EAGER),
    "full, 16 pairs of 1,024, eager": (16, LARGE, FULL | EAGER),
    "full, 16 pairs of 1,024": (16, LARGE, FULL),
    "full, 4 pairs of 1,024": (4, LARGE, FULL),
    "full, fsdp, 16 pairs of 1,024": (16, LARGE, FULL | {"fsdp": True}),
    "full, fsdp, 4 pairs of 1,024": (4, LARGE, FULL | {"fsdp": True}),
    "qlora, 4 pairs of 256": (4, SMALL, LORA | EAGER | {"load_in_4bit": True}),
    "full, adamw_bnb_8bit": (4, SMALL, EAGER | {"optim": "adamw_bnb_8bit"}),
    "full, paged_adamw_8bit": (4, SMALL, EAGER | {"optim": "paged_adamw_8bit"}),
}


def training(run: Run) -> None:
    """Train for ten steps in each of the ways, without saving."""
    for case, (pairs, side, keys) in CASES.items():
        run.attempt(case, partial(rows, run, case, pairs, side, keys))


def rows(run: Run, case: str, pairs: int, side: int, keys: dict[str, Any]) -> Iterator[Row]:
    """Yield the seconds of a step of a training, its memory, and the MFU that it logs."""
    if "load_in_4bit" in keys or "8bit" in keys.get("optim", ""):
        needed("bitsandbytes")
    if "fsdp" in keys and not (run.cuda and hasattr(FSDPModule, "set_reduce_scatter_unused_params")):
        raise Skipped("fsdp needs CUDA and torch 2.15")
    base = checkpoint(run.scratch, "3b", run.device, run.tiny)
    pairs, side = (2, SMALL) if run.tiny else (pairs, side)
    data = pictures(run.scratch, pairs * STEPS, (side, side))
    options = {"per_device_train_batch_size": pairs, "max_steps": 3 if run.tiny else STEPS, "logging_steps": 1}
    options |= {"max_pixels": side**2, "gradient_checkpointing": True, "attn_implementation": "auto"}
    options |= {
        "torch_compile": run.cuda,
        "use_cpu": not run.cuda,
        "bf16": run.cuda,
        "dataloader_num_workers": 0 if run.tiny else 4,
    }
    ends: list[float] = []

    def ended(*_: Any) -> None:
        if run.cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    counted: dict[str, Any] = {}

    def count(trainer: ComparisonTrainer, folder: Path) -> None:
        counted.update(counts(trainer.model))
        logged = [line["mfu"] for line in trainer.state.log_history if "mfu" in line][FIRST:]
        counted["logged_mfu"] = statistics.median(logged) if logged else None

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
    line = row(case, statistics.median(seconds), "s a step", pairs_per_second=pairs / statistics.median(seconds))
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


def pictures(scratch: Path, count: int, size: tuple[int, int] = (640, 480)) -> Path:
    """Return a file of preference pairs about pictures, written on first use."""
    folder = scratch / f"pairs-{count}-{size[0]}"
    path = folder / "pairs.jsonl"
    return path if path.is_file() else runs.picture_pairs(folder, count, pictures=count, size=size)
