"""A sweep of several checkpoints over one data set, over the same forward passes alone, in CPU seconds.

The sweep opens the data, the pictures and the checkpoints; the forward passes find their batches ready-made.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from vlmrm.evaluation.sweep import sweep
from vlmrm.modeling import load_checkpoint

CHECKPOINTS, PAIRS, BATCH = 4, 64, 8
LIMIT = 1.15
ROUNDS = 3


def measure(options: argparse.Namespace) -> list[Row]:
    count, pairs = (2, 4) if options.quick else (CHECKPOINTS, PAIRS)
    with runs.workplace() as folder:
        base = runs.base_model(folder / "base", options.quick)
        checkpoints = [
            runs.reward_checkpoint(base, folder / "training" / f"checkpoint-{i + 1}", seed=i) for i in range(count)
        ]
        data = runs.picture_pairs(folder / "data", pairs, pictures=pairs)
        forward, make_batches = forward_only(checkpoints, data)
        ways = {"sweep": lambda: whole_sweep(folder, data), "forward": lambda: forward}
        timings = harness.interleave(ways, 1 if options.quick else ROUNDS)
        once = harness.stopwatch(make_batches)
    line = row("total", **timings.ratio("sweep", "forward"), unit="x forward", at_most=LIMIT)
    line |= {"checkpoints": count, "pairs": pairs, "sweep_seconds": timings.median("sweep")}
    # What opening the data once for every checkpoint would cost at least, for comparison.
    line |= {"forward_seconds": timings.median("forward"), "opening_data_once_seconds": once}
    return [line]


def whole_sweep(folder: Path, data: Path) -> Callable[[], Any]:
    """Return a sweep without interventions, into new files: it would skip checkpoints with results."""
    words = runs.words(
        model_dirs=folder / "training",
        dataset_path=data,
        eval_batch_size=BATCH,
        interventions="none",
        output_file=Path(tempfile.mkdtemp(dir=folder), "results.csv"),
    )
    return lambda: sweep(words)


def forward_only(checkpoints: list[Path], data: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return every checkpoint's forward passes over prepared batches, and the preparation of these batches."""
    loaded = [load_checkpoint(path, dtype="float32") for path in checkpoints]
    collators = [runs.collator(checkpoint.model, checkpoint.processor) for checkpoint in loaded]
    batches = runs.batches(collators[0], data, BATCH)

    @torch.inference_mode()
    def forward() -> None:
        for checkpoint in loaded:
            for inputs in (inputs for batch in batches for part in batch["parts"] for inputs in part["inputs"]):
                checkpoint.model(**inputs)

    return forward, lambda: runs.batches(collators[0], data, BATCH)


if __name__ == "__main__":
    harness.main("sweep", measure, __doc__)
