"""Compiled blocks: the same scores and gradients, and graphs that outlast a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from benchmarks.shapes import Pair, configuration, reward_model, training
from vlmrm.modeling.compiled import compile_blocks

# Batches of different layouts: pairs with tokens of image, prompt and answers.
BATCHES = [[Pair(16, 10, 5, 7)] * 2, [Pair(36, 12, 9, 4), Pair(16, 3, 8, 30)], [Pair(64, 33, 21, 17)] * 3]
ADAPTERS = LoraConfig(target_modules=r".*language_model.*_proj", init_lora_weights=False)  # none of them zero


def scores_and_gradients(model, batcher, work) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    scores = model(**batcher(work.conversations)).logits.squeeze(-1)
    work.loss(scores).backward()
    return scores.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("size", "lora", "backend"),
    [
        ("tiny", False, "aot_eager"),
        ("tiny", True, "eager"),
        ("windows_tiny", True, "eager"),
        ("state_tiny", False, "eager"),
    ],
)
def test_compiled_blocks_change_no_score_and_no_gradient(size, lora, backend):
    config = configuration(size, image=16)
    model, batcher = reward_model(config, dtype=torch.float64)
    pairs = BATCHES if size != "windows_tiny" else [[replace(pair, image=16) for pair in row] for row in BATCHES]
    works = [training(config, row, irrelevant=False, seed=seed) for seed, row in enumerate(pairs)]
    if size != "state_tiny":
        model.activation_checkpointing_enable({"use_reentrant": False})
    trained = (get_peft_model(model, ADAPTERS) if lora else model).train()
    plain = [scores_and_gradients(trained, batcher, work) for work in works]
    compile_blocks(model, backend)

    graphs = []
    for work, (scores, gradients) in zip(works, plain, strict=True):
        compiled = scores_and_gradients(trained, batcher, work)
        torch.testing.assert_close(compiled, (scores, gradients), rtol=1e-12, atol=1e-12)
        graphs.append(counters["stats"]["unique_graphs"])

    assert 0 < graphs[1] == graphs[2]  # the third batch has a layout of its own, and no graph
