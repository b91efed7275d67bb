"""Forward and backward of one training step with an irrelevant pair: the naive way over ours, in CPU seconds.

`bound` is the ratio of the two ways' operations (benchmarks/flops.py). Inputs are made before the clock starts.

`block_bytes` is what the operators of blocks move that are no matrix product, compiled over eager, in bfloat16 without
checkpointing; `step_launches` the kernels of the whole step, with a fused group as one (benchmarks/blocks.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks import harness
from benchmarks.blocks import blocks
from benchmarks.contest import Contest
from benchmarks.harness import Row, row
from benchmarks.naive import NaiveRewardModel, padded
from benchmarks.shapes import Pair, configuration, quick, reward_model, training

SHORT = [Pair(144, 32, 32, 32)] * 2
# size, pairs, target of the ratio and of its share of the bound
CASES = {
    "h512_resp32": ("h512", SHORT, 2.6, 0.97),
    "h512_resp256": ("h512", [Pair(144, 32, 256, 256)] * 2, 1.75, 0.97),
    "h768_mixed": (
        "h768",
        [Pair(48, 16, 12, 40), Pair(64, 24, 60, 12), Pair(80, 32, 24, 100), Pair(100, 40, 90, 30)],
        2.7,
        0.97,
    ),
    "windows_h512": ("windows_h512", SHORT, 2.6, 0.9),
    "state_h512": ("state_h512", SHORT, 2.5, 0.9),
}
MEMORY = ("h512", [Pair(256, 64, 64, 64)] * 2)
QUICK = [Pair(4, 6, 5, 3), Pair(4, 4, 2, 7)]
MEMORY_RATIO = 0.42
BLOCK_BYTES, STEP_LAUNCHES = 0.45, 0.5
ROUNDS = 5


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for case, (size, pairs, target, of_bound) in CASES.items():
        size, pairs = (quick(size), QUICK) if options.quick else (size, pairs)
        rows += speed(case, size, pairs, target, of_bound, rounds=1 if options.quick else ROUNDS)
    size, pairs = ("tiny", QUICK) if options.quick else MEMORY
    shared, naive = (harness.in_new_process(memory, way, size, pairs) for way in ("ours", "naive"))
    rows.append(row("h512_memory", shared / naive, "x naive", at_most=MEMORY_RATIO, our_mb=shared, naive_mb=naive))
    costs = harness.in_new_process(blocks, size, pairs)
    spared = {name: getattr(costs["eager"], name) - getattr(costs["compiled"], name) for name in ("moved", "kernels")}
    eager = costs["eager"].moved
    rows.append(row("block_bytes", 1 - spared["moved"] / eager, "x eager", at_most=BLOCK_BYTES, eager_mb=eager / 1e6))
    eager = costs["step"].kernels
    rows.append(row("step_launches", 1 - spared["kernels"] / eager, "x eager", at_most=STEP_LAUNCHES, eager=eager))
    return rows


def speed(case: str, size: str, pairs: list[Pair], target: float, of_bound: float, rounds: int) -> list[Row]:
    config = configuration(size, pairs[0].image)
    contest = Contest(config, training(config, pairs))
    timings = harness.interleave(contest.steps(), rounds)
    naive, shared = contest.operations()
    bound = naive.training / shared.training
    line = row(case, **timings.ratio("naive", "ours"), unit="x naive", at_least=target, bound=bound)
    line |= {"naive_tokens": naive.tokens, "our_tokens": shared.tokens}
    line |= {"naive_seconds": timings.median("naive"), "our_seconds": timings.median("ours")}
    return [line, row(f"{case}_of_bound", line["measured"] / bound, "of bound", at_least=of_bound)]


def memory(way: str, size: str, pairs: list[Pair]) -> float:
    """Return the MB by which the peak of a fresh process rises in its first step, gradients included."""
    config = configuration(size)
    work = training(config, pairs)
    step = {"ours": our_step, "naive": naive_step}[way](config, work.conversations)
    before = harness.memory()
    work.loss(step()).backward()
    return harness.peak_memory() - before


def our_step(config, conversations) -> Callable[[], torch.Tensor]:
    model, batcher = reward_model(config)
    inputs = batcher(conversations)
    return lambda: model.train()(**inputs).logits.squeeze(-1)


def naive_step(config, conversations) -> Callable[[], torch.Tensor]:
    model, inputs = NaiveRewardModel(reward_model(config)[0]), padded(conversations)
    return lambda: model.train()(**inputs)


if __name__ == "__main__":
    harness.main("train_step", measure, __doc__)
