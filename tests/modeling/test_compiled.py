"""Compiled blocks: the same scores and gradients, and graphs that outlast a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import logsigmoid
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.batching.test_shared import in_type
from tests.families.cases import CASES
from tests.families.table import FAMILIES
from vlmrm.modeling import batcher_for
from vlmrm.modeling.compiled import compile_blocks
from vlmrm.rendering import Renderer
from vlmrm.training.engines import own_part

BATCHES = ("irrelevant branches", "turns", "two images")  # of different layouts, all of several images
ADAPTERS = LoraConfig(target_modules=r".*language_model.*_proj", init_lora_weights=False)  # none of them zero


def prepared(model_type: str, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    family = next(it for it in FAMILIES if it.model_type == model_type)
    processor = family.make_processor()
    model = family.make_model(processor).to(dtype)
    batcher, renderer = batcher_for(model, processor, "shared"), Renderer(processor)
    return model, [in_type(batcher([renderer.render(it) for it in CASES[name]]), dtype) for name in BATCHES]


def scores_and_gradients(model: Any, batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    scores = model(**batch).logits.squeeze(-1)
    (-logsigmoid(scores.diff()).mean()).backward()
    gradients = (own_part(weight.grad).clone() for weight in model.parameters() if weight.grad is not None)
    return [scores.detach(), *gradients]


@pytest.fixture
def group_of_one():
    distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_compiled_blocks_that_fsdp_shards_change_no_gradient(group_of_one):
    model, batches = prepared("qwen2_5_vl", torch.float64)
    model.activation_checkpointing_enable({"use_reentrant": False})
    plain = [scores_and_gradients(model.train(), batch) for batch in batches]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, reshard_after_forward=True)
    compile_as_before(fully_shard(model), plain, batches, "eager")


@pytest.mark.parametrize(
    ("model_type", "dtype", "lora", "backend"),
    [
        ("qwen2_5_vl", torch.float64, False, "aot_eager"),  # also the graphs of backward
        ("qwen3_5", torch.float64, False, "eager"),  # layers with a state
        ("qwen2_5_vl", torch.bfloat16, True, "eager"),
        ("gemma3", torch.bfloat16, True, "eager"),
        *((name, torch.float64, False, "eager") for name in ("qwen3_vl", "internvl", "llama4", "smolvlm", "glm4v")),
    ],
)
def test_compiled_blocks_change_no_score_and_no_gradient(model_type, dtype, lora, backend):
    model, batches = prepared(model_type, dtype)
    model.activation_checkpointing_enable({"use_reentrant": False})
    trained = (get_peft_model(model, ADAPTERS) if lora else model).train()
    plain = [scores_and_gradients(trained, batch) for batch in batches]
    compile_as_before(model, plain, batches, backend, trained, 1e-12 if dtype == torch.float64 else 0)


class Block(GradientCheckpointingLayer):
    def forward(self, hidden):
        return hidden * hidden + hidden


def test_graphs_round_half_precision_where_eager_does():
    block, hidden = Block(), torch.randn(1, 64, dtype=torch.bfloat16)
    plain = block(hidden)
    compile_blocks(block)
    assert torch.equal(block(hidden), plain)


def compile_as_before(
    model: Any, plain: Any, batches: Any, backend: str, trained: Any = None, tolerance: float = 1e-12
) -> None:
    """Compile blocks, and compare what `plain` has of the same batches."""
    torch.compiler.reset()
    compile_blocks(model, backend)
    graphs = []
    for batch, expected in zip(batches, plain, strict=True):
        torch.testing.assert_close(
            scores_and_gradients(trained or model, batch), expected, rtol=tolerance, atol=tolerance
        )
        graphs.append(counters["stats"]["unique_graphs"])

    assert 0 < graphs[1] == graphs[2]  # the third batch has a layout of its own, and no graph
