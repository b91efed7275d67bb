"""Data sets of a thousand to a million rows: seconds until a training has made its first step, and peak memory.

Each is measured in a process of its own that has nothing cached: reading the file counts, as does saving the model
after that one step; importing the libraries does not. The rows hold references to pictures, as rows do.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import harness, runs
from benchmarks.harness import Row, row

ROWS = {"1k": 1_000, "100k": 100_000, "1M": 1_000_000}
QUICK_ROWS = {"1k": 20, "100k": 40, "1M": 60}
SECONDS = 10.0
MEMORY = 1.1  # of the memory at a thousand rows


def measure(options: argparse.Namespace) -> list[Row]:
    rows, peaks = [], {}
    for name, count in (QUICK_ROWS if options.quick else ROWS).items():
        with runs.workplace() as folder:
            base = runs.base_model(folder / "base", quick=True)
            data = runs.picture_pairs(folder / "data", count, pictures=8, size=(112, 112))
            megabytes = data.stat().st_size / 1e6
            seconds, before, peaks[name] = harness.in_new_process(first_step, base, data)
        limit = {"at_most": SECONDS} if name == "1M" else {}
        rows.append(row(f"first_step_{name}", seconds, "s", **limit, rows=count, file_mb=megabytes))
        limit = {"at_most": MEMORY} if name == "1M" else {}
        figures = {"peak_mb": peaks[name], "imports_mb": before}
        rows.append(row(f"memory_{name}", peaks[name] / peaks["1k"], "x 1k", **limit, **figures))
    return rows


def first_step(base: Path, data: Path) -> tuple[float, float, float]:
    """Return the seconds of a training of one step, and the peak memory in MB before and after it."""
    from vlmrm.training import train

    with runs.workplace() as folder:
        before = harness.memory()
        started = time.perf_counter()
        keys = {"max_steps": 1, "per_device_train_batch_size": 2, "use_irrelevant_queries": True}
        train(runs.training_words(base, data, folder / "training", **keys))
        return time.perf_counter() - started, before, harness.peak_memory()


if __name__ == "__main__":
    harness.main("scale", measure, __doc__)
