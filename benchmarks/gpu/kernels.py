"""Every attention kernel in bfloat16 over shared rows, against plain attention over each conversation in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from benchmarks import harness
from benchmarks.gpu.running import Run, Unequal, needed
from benchmarks.harness import Row, Skipped, row
from vlmrm.batching.shared import PackedLayout
from vlmrm.batching.tree import Tree, grow
from vlmrm.modeling import kernels as ours
from vlmrm.modeling.kernels import FLASH, TORCH
from vlmrm.modeling.masks import MaskRule, mask_rule
from vlmrm.modeling.vision import Segments, by_segments

ROUNDING = 2e-2  # of bfloat16, after a kernel that sums in float32
APART = 10 * ROUNDING  # what leaving out a part of the rule must at least change
WINDOW, SOFTCAP = 48, 2.0
SPEED_PAIRS = 16


@dataclass(frozen=True)
class Case:
    """What a kernel is asked for: heads of queries and keys and their width, and what the mask and softmax have."""

    heads: int = 8
    key_heads: int = 2
    width: int = 128
    window: int | None = None
    images: bool = False
    softcap: float | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        marks = [name for name in ("window", "images", "softcap", "sinks") if getattr(self, name)]
        return f"{' '.join(marks) or 'causal'} {self.heads}/{self.key_heads}x{self.width}"


GROUPS = [Case(heads=12, key_heads=4, width=128)]  # no power of two
PLAIN = [Case(width=width) for width in (64, 80, 128, 256)] + [Case(heads=16, key_heads=16, width=80), Case(16, 2)]
WINDOWS = [Case(width=width, window=WINDOW) for width in (64, 128, 256)]
MASKS = [Case(width=width, images=True) for width in (64, 128, 256)]
SOFT = [Case(width=64, sinks=True), Case(width=64, sinks=True, window=WINDOW), Case(width=128, softcap=SOFTCAP)]
SOFT += [Case(width=256, softcap=SOFTCAP)]
# The cases of each kernel: all that it takes.
CASES = {
    "varlen": PLAIN + GROUPS + WINDOWS,
    "sdpa": PLAIN + WINDOWS + MASKS,
    "explicit": [PLAIN[2], WINDOWS[1], MASKS[1], *SOFT],
    **dict.fromkeys(FLASH, PLAIN + WINDOWS),
    "flex": [*PLAIN[:4:3], *GROUPS, WINDOWS[1], *MASKS, *SOFT],  # each compiles anew, so that it is last
}


def kernels(run: Run) -> None:
    """Compare outputs and gradients, kernel by kernel, and time those for half precision."""
    work, short = Rows(run.device, SMALL), Rows(run.device, SHORT)
    for case in dict.fromkeys(replace(case, heads=8, key_heads=2, width=64) for case in chain(*CASES.values())):
        if case != Case(width=64):
            run.attempt(f"control {case.name}", partial(control, work, case))
    long = SMALL if run.tiny else LONG
    for name, cases in CASES.items():
        module = FLASH.get(name)
        if module is not None and find_spec(module) is None:  # one row for all of its cases
            run.attempt(name, partial(needed, module))
            continue
        for case in cases[:2] if run.tiny else cases:
            run.attempt(label := f"{name} {case.name}", partial(equality, run, work, label, name, case))
        run.attempt(label := f"{name} in a short row", partial(equality, run, short, label, name, cases[-1]))
        run.attempt(f"{name} speed", partial(speed, run, long, name, Case(16, 2)))
        if name == "varlen":
            vision(run)


# Token lists: conversations with common prefixes. SMALL has a lone prompt too.
SMALL = [[0] * 200 + [n] * (30 + 7 * n) for n in range(1, 4)] + [[9] * 64 + [n] * 5 for n in range(2)] + [[7] * 33]
SHORT = [[0] * 60 + [n] * 12 for n in (1, 2, 3)]  # 96 tokens: where torch would choose a kernel for decoding
LONG = [[100 + n] * 1090 + [side] * 256 for n in range(SPEED_PAIRS) for side in (1, 2)]
LENGTHS = [64, 64, 32, 64, 16, 64, 300, 64, 8, 520]  # of windows and images of a tower
BLOCK = slice(20, 60)  # of an image in the first prompt


class Rows:
    """A shared row of token lists, and where each conversation's tokens are in it."""

    def __init__(self, device: str, lists: list[list[int]]):
        tree: Tree = grow([np.array(tokens) for tokens in lists])
        self.device, self.layout = device, PackedLayout.of(tree)
        segments = self.layout.segments
        self.paths = [
            torch.cat([torch.arange(segments[i].start, segments[i].stop) for i in tree.path(end)]).to(device)
            for end in tree.ends
        ]
        self.blocks = torch.full((len(self.layout),), -1, device=device)
        self.blocks[BLOCK] = 0

    def states(self, case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return queries, keys, values [1, heads, T, width] and the gradient of the output, rounded to bfloat16."""
        generator = torch.Generator().manual_seed(0)
        heads = (case.heads, case.key_heads, case.key_heads, case.heads)
        shapes = [(1, count, len(self.layout), case.width) for count in heads]
        *inputs, gradient = (torch.randn(*shape, generator=generator).bfloat16().to(self.device) for shape in shapes)
        return inputs, gradient.transpose(1, 2)

    def sinks(self, case: Case, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.linspace(-1, 1, case.heads, device=self.device, dtype=dtype) if case.sinks else None

    def rule(self, case: Case) -> MaskRule | None:
        """Return the rule that transformers' mask of a case becomes; None where it is causal."""
        if case.images:
            function = or_masks(causal_mask_function, blockwise_overlay(self.blocks[None]))
        elif case.window is not None:
            function = sliding_window_causal_mask_function(case.window)
        else:
            return None
        return mask_rule(1, len(self.layout), len(self.layout), mask_function=function)


def reference(work: Rows, case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend over each conversation alone, by the textbook: [1, heads, T, width] → [1, T, heads, width]."""
    groups, sinks = case.heads // case.key_heads, work.sinks(case, query.dtype)
    output = torch.zeros(query.shape[2], case.heads, case.width, dtype=query.dtype, device=query.device)
    for path in work.paths:
        keys, values = (states[0, :, path].repeat_interleave(groups, 0) for states in (key, value))
        scores = query[0, :, path] @ keys.mT / case.width**0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        place = torch.arange(len(path), device=path.device)
        distance = place[:, None] - place[None]
        allowed = (distance >= 0) & (distance < (case.window or len(path)))
        if case.images:
            block = work.blocks[path]
            allowed |= (block[:, None] == block) & (block >= 0)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(path), 1)], dim=2)
        weights = scores.softmax(dim=2)[:, :, : len(path)]
        output = output.index_copy(0, path, (weights @ values).transpose(0, 1))  # a common prefix has one value
    return output[None]


def kernel(work: Rows, name: str, case: Case, *states: torch.Tensor) -> torch.Tensor:
    """Attend with one of the kernels: [1, heads, T, width] → [1, T, heads, width]."""
    scale, rule = case.width**-0.5, work.rule(case)
    sinks = work.sinks(case, states[0].dtype)
    if name == "varlen":
        return ours.varlen(*states, work.layout, scale, rule)
    if name in FLASH:
        return ours.varlen(*states, work.layout, scale, rule, name)
    if name == "flex":
        return ours.flex(*states, work.layout, rule, scale, case.softcap, sinks)
    if name == "sdpa":
        return ours.per_segment(*states, work.layout, scale, 0.0, rule)
    return ours.explicit(*states, work.layout, rule, scale, 0.0, case.softcap, sinks)


def results_of(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values in float32."""
    leaves = [state.to(dtype).requires_grad_() for state in inputs]
    output = attend(*leaves)
    return [part.float() for part in (output, *torch.autograd.grad(output, leaves, gradient.to(dtype)))]


def equality(run: Run, work: Rows, label: str, name: str, case: Case) -> Iterator[Row]:
    """Yield the error of a kernel."""
    for_cuda_alone(run, name)
    inputs, gradient = work.states(case)
    made = results_of(partial(kernel, work, name, case), inputs, gradient, torch.bfloat16)
    exact = results_of(partial(reference, work, case), inputs, gradient, torch.float32)
    yield error_row(label, made, exact)


def error_row(case: str, made: list[torch.Tensor], exact: list[torch.Tensor]) -> Row:
    """Return the largest error of an output and gradients, relative to the norm of what each should be.

    Raises:
        Unequal: when it is more than rounding.
    """
    names = ("output", "query", "key", "value")
    errors = {name: ((a - b).norm() / b.norm()).item() for name, a, b in zip(names, made, exact, strict=True)}
    for name, error in errors.items():
        if not error <= ROUNDING:  # nor NaN
            raise Unequal(f"{name} is off by {error:.2g} of its size: more than rounding")
    return row(case, max(errors.values()), "of its size", at_most=ROUNDING) | errors


def for_cuda_alone(run: Run, name: str) -> None:
    if not run.cuda and name in ("varlen", "flex", *FLASH):
        raise Skipped("runs on CUDA alone")


def control(work: Rows, case: Case) -> Iterator[Row]:
    """Yield how much a part of the rule changes, so that a kernel which leaves it out would be seen.

    Raises:
        Unequal: when it changes too little.
    """
    inputs, gradient = work.states(case)
    plain = Case(case.heads, case.key_heads, case.width)
    without, exact = (
        results_of(partial(reference, work, it), inputs, gradient, torch.float32) for it in (plain, case)
    )
    change = max(((a - b).norm() / b.norm()).item() for a, b in zip(without, exact, strict=True))
    if change < APART:
        raise Unequal(f"leaving it out changes {change:.2g} of the size alone")
    yield row(f"control {case.name}", change, "of its size", at_least=APART)


def vision(run: Run) -> None:
    """Compare the attention of vision towers: windows and whole images, by their lengths."""
    kernels_here = [TORCH, *(flash for flash, module in FLASH.items() if find_spec(module))] if run.cuda else [TORCH]
    for heads, width in ((16, 80), (16, 64), (16, 72)):
        for flash in kernels_here:
            name = f"tower {flash if run.cuda else 'sdpa'} {heads}/{heads}x{width}"
            run.attempt(name, partial(tower_equality, run, name, flash, Case(heads, heads, width)))


def tower_equality(run: Run, name: str, flash: str, case: Case) -> Iterator[Row]:
    """Yield the error of the attention of towers over segments of several lengths."""
    generator = torch.Generator().manual_seed(0)
    segments = Segments(LENGTHS)
    shape = (1, case.heads, sum(LENGTHS), case.width)
    *inputs, gradient = (torch.randn(*shape, generator=generator).bfloat16().to(run.device) for _ in range(4))
    cumulative = segments.cumulative(torch.device(run.device))
    options = {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "flash": flash, "is_causal": False}

    def segmented(*states: torch.Tensor) -> torch.Tensor:
        return by_segments(torch.nn.Identity(), *states, None, case.width**-0.5, **options)[0]

    def plain(lengths: list[int], *states: torch.Tensor) -> torch.Tensor:
        outputs = []
        for query, key, value in zip(*(state[0].split(lengths, dim=1) for state in states), strict=True):
            outputs.append((query @ key.mT * case.width**-0.5).softmax(dim=2) @ value)
        return torch.cat(outputs, dim=1).transpose(0, 1)[None]

    gradient = gradient.transpose(1, 2)
    made = results_of(segmented, inputs, gradient, torch.bfloat16)
    exact = results_of(partial(plain, LENGTHS), inputs, gradient, torch.float32)
    joined = plain([sum(LENGTHS)], *(state.float() for state in inputs))
    if (change := ((joined - exact[0]).norm() / exact[0].norm()).item()) < APART:
        raise Unequal(f"without its windows it changes by {change:.2g} of its size alone")
    yield error_row(name, made, exact)


def speed(run: Run, lists: list[list[int]], name: str, case: Case) -> Iterator[Row]:
    """Yield the operations a second of forward and backward over a row of pairs, those that the mask needs counted."""
    for_cuda_alone(run, name)
    work = Rows(run.device, lists)
    inputs, gradient = work.states(case)

    def both_ways() -> None:
        leaves = [state.detach().requires_grad_() for state in inputs]
        torch.autograd.grad(kernel(work, name, case, *leaves), leaves, gradient)

    seconds = harness.interleave({name: lambda: both_ways}, run.rounds, run.device).median(name)
    visible = sum((s.stop - s.start) * (s.before + (s.stop - s.start) / 2) for s in work.layout.spans)
    operations = 3.5 * 4 * visible * case.heads * case.width  # backward makes five products of forward's two
    line: Any = row(f"{name} speed", operations / seconds / 1e12, "TFLOP/s", tokens=len(work.layout))
    yield line | {"milliseconds": 1000 * seconds}
