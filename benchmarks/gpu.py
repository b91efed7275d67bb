"""One training step at the real sizes of Qwen2.5-VL 3B and 7B on a CUDA GPU, with random weights, in bfloat16.

4 pairs and an irrelevant pair, gradient checkpointing on both sides. Utilisation counts the operations of unique
tokens, forward and backward once, against a matrix product measured on the spot; recomputation counts for nothing.
Needs torch, transformers and numpy, and the model configurations under VLMRM_TEST_DATA (default ../shared/data).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from benchmarks import harness
from benchmarks.contest import Contest
from benchmarks.harness import Row, Skipped, row
from benchmarks.shapes import Pair, configuration, training
from vlmrm.batching.shared import PackedLayout, grow
from vlmrm.modeling.attention import shared_prefix
from vlmrm.modeling.masks import mask_rule

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = {"3b": "qwen2.5-vl-3b-config", "7b": "qwen2.5-vl-7b-processor"}
PAIRS = {"1024+64+256": [Pair(1024, 64, 256, 256)] * 4, "256+64+256": [Pair(256, 64, 256, 256)] * 4}
QUICK_PAIRS = {"4+6+5": [Pair(4, 6, 5, 3)] * 4}
RATIO, UTILISATION = 2.0, 0.45  # to reach at 3B
ROUNDS = 5
ROUNDING = 2e-2  # of bfloat16, after a kernel that sums in float32
SCORE_ROUNDING = 0.2  # of bfloat16, through all layers


def measure(options: argparse.Namespace) -> list[Row]:
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        raise Skipped("there is no CUDA GPU: run it on one (--quick runs a tiny model on a CPU)")
    device = "cuda" if cuda else "cpu"
    rows = attention_errors(device)
    peak = matrix_product(device, 256 if options.quick else 8192)
    rows.append(row("matrix_product", peak / 1e12, "TFLOP/s"))
    for size, config in configurations(options.quick).items():
        for shape, pairs in (QUICK_PAIRS if options.quick else PAIRS).items():
            rows += step(f"{size} {shape}", config, pairs, device, peak, 1 if options.quick else ROUNDS)
            if cuda:
                torch.cuda.empty_cache()
    return rows


def configurations(quick: bool) -> dict[str, Any]:
    if quick:
        return {"3b": configuration("tiny")}
    folder = Path(os.environ.get("VLMRM_TEST_DATA", ROOT.parent / "shared" / "data"))
    for name in CONFIGURATIONS.values():
        if not (folder / name / "config.json").is_file():
            raise Skipped(f"{folder / name} has no config.json: set VLMRM_TEST_DATA to a folder with {name}")
    return {size: AutoConfig.from_pretrained(folder / name) for size, name in CONFIGURATIONS.items()}


def step(case: str, config: Any, pairs: list[Pair], device: str, peak: float, rounds: int) -> list[Row]:
    """Return the rows of one model and shape."""
    work = training(config, pairs)
    contest = Contest(config, work, tolerance=SCORE_ROUNDING, device=device, dtype=torch.bfloat16)
    for model in (contest.model, contest.naive.lm):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ways = contest.steps()
    timings = harness.interleave(ways, rounds, device)
    naive, shared = contest.operations()
    seconds = timings.median("ours")
    big = case.startswith("3b")
    ratio = row(case, **timings.ratio("naive", "ours"), unit="x naive", at_least=RATIO if big else None)
    ratio |= {"bound": naive.forward / shared.forward, "naive_tokens": naive.tokens, "our_tokens": shared.tokens}
    ratio |= {
        "naive_seconds": timings.median("naive"),
        "our_seconds": seconds,
        "pairs_per_second": len(pairs) / seconds,
    }
    ratio |= {f"{way}_peak_gib": peak_gib(prepare, device) for way, prepare in ways.items()}
    share = 3 * shared.body / seconds / peak
    return [ratio, row(f"{case} utilisation", share, "of peak", at_least=UTILISATION if big else None)]


def peak_gib(prepare: Callable[[], Callable[[], Any]], device: str) -> float | None:
    """Return the peak memory of tensors during a step in GiB, weights included; None on a CPU."""
    if device == "cpu":
        return None
    work = prepare()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30


def matrix_product(device: str, size: int) -> float:
    """Return the operations per second of a bfloat16 product of square matrices, the peak of this machine."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            a @ b

    timings = harness.interleave({"product": lambda: products}, 5, device)
    return 10 * 2 * size**3 / timings.median("product")


def attention_errors(device: str) -> list[Row]:
    """Return the errors of shared-prefix attention in bfloat16 (on CUDA, the variable-length kernel, and FlexAttention
    for image blocks and sinks), relative to one call per span in float32: of output and gradients, as a fraction of
    their norm.

    Raises:
        AssertionError: when one is more than rounding; the kernel then reads the layout differently.
    """
    lists = [[0] * 200 + [n] * (30 + 7 * n) for n in range(1, 4)] + [[9] * 64 + [n] * 5 for n in range(2)]
    layout = PackedLayout.of(grow([np.array(tokens) for tokens in lists]))
    length = len(layout)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, length, 64, generator=generator).bfloat16() for heads in (8, 2, 2, 8)]
    *inputs, out_gradient = (state.to(device) for state in states)
    images = torch.full((1, length), -1, device=device)
    images[:, 20:60] = 0  # in a prompt
    both_ways = or_masks(causal_mask_function, blockwise_overlay(images))

    def run(dtype: torch.dtype, function: Callable, sinks: bool) -> list[torch.Tensor]:
        leaves = [state.to(dtype).requires_grad_() for state in inputs]
        keywords = {"s_aux": torch.linspace(-1, 1, 8, device=device, dtype=dtype)} if sinks else {}
        rule = mask_rule(1, length, length, mask_function=function)
        output = shared_prefix(torch.nn.Identity(), *leaves, rule, 0.125, layout=layout, **keywords)[0]
        return [output, *torch.autograd.grad(output, leaves, out_gradient.to(dtype).transpose(1, 2))]

    rows = []
    for name, function, sinks in (
        ("attention_error", causal_mask_function, False),
        ("attention_error window", sliding_window_causal_mask_function(48), False),
        ("attention_error images", both_ways, False),
        ("attention_error sinks", causal_mask_function, True),
    ):
        kernel, exact = (run(dtype, function, sinks) for dtype in (torch.bfloat16, torch.float32))
        error = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(kernel, exact, strict=True))
        if not error <= ROUNDING:
            raise AssertionError(f"{name}: shared-prefix attention is off by {error:.2g} of its size on {device}")
        rows.append(row(name, error, "of its size", at_most=ROUNDING))
    return rows


if __name__ == "__main__":
    harness.main("gpu", measure, __doc__)
