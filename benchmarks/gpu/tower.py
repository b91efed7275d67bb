"""The vision tower's share of a 3B's step, in seconds and in operations, for images of three sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks import flops, harness
from benchmarks.gpu.running import Run
from benchmarks.gpu.steps import ours_alone, step_of
from benchmarks.harness import Row, row
from benchmarks.shapes import Pair, training
from vlmrm.batching import to_device

IMAGES = {"448 x 448": 256, "896 x 896": 1024, "1260 x 1260": 2025}  # tokens
PAIRS = 4


def tower(run: Run) -> None:
    """Steps of 4 pairs under checkpointing, and the tower's forward and backward alone."""
    model = ours_alone(run)
    for size, tokens in IMAGES.items():
        pair = Pair(4, 6, 5, 3) if run.tiny else Pair(tokens, 64, 256, 256)
        run.attempt(size, partial(share, run, model, size, pair))


def share(run: Run, make: Callable[[], tuple[Any, Any]], size: str, pair: Pair) -> Iterator[Row]:
    """Yield the seconds of the tower over those of a step."""
    model, batcher = make()
    work = training(model.config, [pair] * PAIRS, irrelevant=False)
    media = to_device(batcher(work.conversations)["media"], model.device)["image"]

    def alone() -> Callable[[], Any]:
        model.zero_grad()
        return lambda: sum(
            layer.float().square().mean() for image in model.run_tower("image", media) for layer in image.layers
        ).backward()

    timings = harness.interleave({"step": step_of(model, batcher, work), "tower": alone}, run.rounds, run.device)
    grids = media["tensors"]["image_grid_thw"].tolist()
    in_tower = sum(flops.vision(model.config, grid) for grid in grids)
    of_operations = in_tower / flops.of_shared(model.config, batcher(work.conversations)).body
    line = row(size, **timings.ratio("tower", "step"), unit="of the step", of_operations=of_operations)
    line |= {f"{name}_seconds": timings.median(name) for name in timings.seconds}
    yield line | {"tflops": 3 * in_tower / timings.median("tower") / 1e12, "image_tokens": pair.image}
