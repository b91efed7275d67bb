"""Linear layers of odd widths: padded, they compute the same, and nothing else about them changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import Qwen2_5_VLConfig

from vlmrm.modeling.reward_model import reward_model_class
from vlmrm.modeling.vision import AlignedLinear, align, aligned_linear

PUBLISHED = Path(__file__).with_name("published")


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


def test_it_pads_where_a_gpu_computes_in_half_precision_alone(monkeypatch):
    layer, called = nn.Linear(8, 12), []
    align([layer])
    assert type(layer) is AlignedLinear and set(layer.state_dict()) == {"weight", "bias"}
    monkeypatch.setattr("vlmrm.modeling.vision.aligned_linear", lambda states, *_: called.append(states.dtype))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    layer(torch.ones(1, 8))
    layer.to("meta")(torch.ones(1, 8, device="meta"))
    layer.bfloat16()(torch.ones(1, 8, device="meta", dtype=torch.bfloat16))
    assert called == [torch.bfloat16]


def test_the_odd_layers_of_published_towers_are_found_and_no_others():
    config = Qwen2_5_VLConfig(**json.loads((PUBLISHED / "qwen2.5-vl-3b.json").read_text())["config"])
    with torch.device("meta"):
        model = reward_model_class(config)(config)
    found = {name for name, module in model.named_modules() if isinstance(module, AlignedLinear)}
    layers = {name.rsplit(".", 1)[-1] for name in found}
    assert layers == {"gate_proj", "up_proj", "down_proj"} and len(found) == 3 * config.vision_config.depth
    assert all(name.startswith("model.visual.") for name in found)
