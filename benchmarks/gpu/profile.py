"""Where a step of a 3B goes: milliseconds and launches by class of kernel, of the step and of its tower alone."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks.gpu.running import Run
from benchmarks.gpu.steps import PAIR, QUICK, ours_alone, step_of
from benchmarks.harness import Row, row
from benchmarks.shapes import Pair, candidates, training
from vlmrm.batching import to_device
from vlmrm.modeling.compiled import compile_blocks

PAIRS = 4
# By the names of kernels; the first that fits. Fused: compiled, or torch's own of several operations.
CLASSES = {
    "attention": "flash|fmha|attn|attention",
    "products": "gemm|nvjet|cutlass|splitK",
    "fused": "^triton",
    "copies": "Memcpy|Memset|copy|CatArray",
}


def profile(run: Run) -> None:
    """Steps of four pairs under checkpointing, their tower, and the score of one conversation: eager and compiled."""
    model = ours_alone(run)
    for way in ("eager", "compiled"):
        for what, prepare in {"step": step, "tower": tower, "score": score}.items():
            run.attempt(f"{what}, {way}", partial(kernels, run, model, f"{what}, {way}", prepare))


def kernels(run: Run, make: Callable[[], tuple[Any, Any]], case: str, prepare: Callable[..., Any]) -> Iterator[Row]:
    """Yield the seconds that the device computes in one call of `prepare`'s function, and what it computes."""
    model, batcher = make()
    if case.endswith("compiled") and not hasattr(model, "blocks_compiled"):
        compile_blocks(model, "aot_eager" if run.tiny else "inductor")
        model.blocks_compiled = True
    waits = torch.cuda.synchronize if run.cuda else lambda: None
    started = time.perf_counter()
    prepare(run, model, batcher)()
    waits()
    first = time.perf_counter() - started
    walls, hosts = [], []
    for _ in range(1 if run.tiny else 3):
        work = prepare(run, model, batcher)
        waits()
        started = time.perf_counter()
        work()
        hosts.append(time.perf_counter() - started)
        waits()
        walls.append(time.perf_counter() - started)
    work = prepare(run, model, batcher)
    waits()
    with profiler(activities=[ProfilerActivity.CUDA if run.cuda else ProfilerActivity.CPU]) as profiled:
        work()
        waits()
    device = DeviceType.CUDA if run.cuda else DeviceType.CPU
    milliseconds: Counter[str] = Counter()
    events = [event for event in profiled.events() if event.device_type == device]
    for event in events:
        name = next((name for name, words in CLASSES.items() if re.search(words, event.name)), "rest")
        milliseconds[name] += event.self_device_time_total / 1000 if run.cuda else event.self_cpu_time_total / 1000
    line = row(case, milliseconds.total(), "ms of kernels", wall_ms=1000 * min(walls), host_ms=1000 * min(hosts))
    line |= {f"{name}_ms": milliseconds[name] for name in (*CLASSES, "rest")}
    yield line | {"launches": len(events), "first_seconds": first}


def step(run: Run, model: Any, batcher: Any) -> Callable[[], Any]:
    work = training(model.config, [QUICK if run.tiny else PAIR] * PAIRS, irrelevant=False)
    return step_of(model.train(), batcher, work)()


def tower(run: Run, model: Any, batcher: Any) -> Callable[[], Any]:
    work = training(model.config, [QUICK if run.tiny else PAIR] * PAIRS, irrelevant=False)
    media = to_device(batcher(work.conversations)["media"], model.device)["image"]

    def alone() -> None:
        features = [layer for image in model.train().run_tower("image", media) for layer in image.layers]
        torch.stack([layer.float().square().mean() for layer in features]).sum().backward()

    model.zero_grad()
    return alone


def score(run: Run, model: Any, batcher: Any) -> Callable[[], Any]:
    pair = QUICK if run.tiny else Pair(256, 32, 32, 32)
    work = candidates(model.config, 1, pair.image, pair.text, pair.chosen)
    inputs = to_device(batcher(work.conversations), model.device)
    return torch.inference_mode()(lambda: model.eval()(**inputs))
