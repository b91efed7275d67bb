"""Linear layers of widths that are no multiples of eight, for CUDA in half precision.

Matrix units read sixteen bytes at a time. Where a row of a matrix is no multiple of that, as in the vision tower of
Qwen2.5-VL with its 3420, cuBLAS takes kernels of a third of the speed; padding the weights in each call costs less.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import linear, pad

ALIGNED = 8  # numbers of half precision in sixteen bytes


class AlignedLinear(nn.Linear):
    """A linear layer that computes with its weights padded, where that is faster; its parameters stay as they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        half = input.dtype in (torch.bfloat16, torch.float16)
        if input.is_cuda and (half or torch.is_autocast_enabled("cuda")):
            return aligned_linear(input, self.weight, self.bias)
        return super().forward(input)


def aligned_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return states[..., I] times weight[O, I] plus bias[O]: [..., O], with I and O padded by zeros."""
    outputs, inputs = weight.shape
    rows, columns = -outputs % ALIGNED, -inputs % ALIGNED
    if bias is not None and rows:
        bias = pad(bias, (0, rows))
    padded = linear(pad(states, (0, columns)) if columns else states, pad(weight, (0, columns, 0, rows)), bias)
    return padded[..., :outputs] if rows else padded


def align(parts: Iterable[nn.Module]) -> None:
    """Make `AlignedLinear` of the linear layers in `parts` with a width that is no multiple of eight."""
    for part in parts:
        for module in part.modules():
            if type(module) is nn.Linear and (module.in_features % ALIGNED or module.out_features % ALIGNED):
                module.__class__ = AlignedLinear
