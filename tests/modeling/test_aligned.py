"""Linear layers of odd widths: padded, they compute the same, and nothing else about them changes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from vlmrm.modeling.vision import aligned_linear


@pytest.mark.parametrize("outputs, inputs", [(12, 16), (16, 12), (9, 7), (16, 8)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_are_those_of_the_layer(outputs, inputs, has_bias):
    generator = torch.manual_seed(0)
    shapes = [(2, 3, inputs), (outputs, inputs), (outputs,)][: 3 if has_bias else 2]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    states, weight, bias = (*leaves, None)[:3]
    ours, own = aligned_linear(states, weight, bias), linear(states, weight, bias)
    torch.testing.assert_close(ours, own, rtol=1e-12, atol=1e-12)
    weights = torch.randn(own.shape, generator=generator, dtype=torch.float64)
    for mine, its in zip(*(torch.autograd.grad(it, leaves, weights) for it in (ours, own)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
