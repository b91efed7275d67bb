"""The last layer's feed-forward part is computed for scored tokens alone.

That this changes no score and no gradient is tested with the shared batch.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoProcessor

from tests.modeling.samples import SAMPLES, scores
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import batcher_for, load_for_training
from vlmrm.modeling.attention import prune_last_layer
from vlmrm.rendering import Renderer


@pytest.fixture
def processor(tiny_checkpoint):
    return AutoProcessor.from_pretrained(tiny_checkpoint)


@pytest.fixture
def model(tiny_checkpoint):
    return load_for_training(tiny_checkpoint, dtype=torch.float32, attn_implementation="sdpa", seed=0)


def tokens_of_each_layer(model) -> list[int]:
    """A list that gets the number of tokens in each layer's feed-forward part, call by call."""
    counts: list[int] = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, args, output: counts.append(args[0].shape[1]))
    return counts


def test_the_last_layer_computes_what_is_scored(model, processor):
    batcher = batcher_for(model, processor, "shared")
    counts = tokens_of_each_layer(model)
    inputs = batcher([Renderer(processor).render(read_conversation(sample)) for sample in SAMPLES])
    model(**inputs)
    row_length = inputs["input_ids"].shape[1]
    assert counts == [*[row_length] * (len(counts) - 1), len(SAMPLES)]


def test_padded_rows_are_left_as_they_are(model, processor):
    expected = scores(model, processor)
    prune_last_layer(model.model.language_model)
    counts = tokens_of_each_layer(model)
    assert torch.equal(scores(model, processor), expected)
    assert len(set(counts)) == 1
