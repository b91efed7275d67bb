"""Routers: their loss counts a token once for each conversation that holds it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoProcessor
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from tests.batching.test_shared import CASES, in_type
from tests.families.reference import rounding_nowhere
from tests.mixtures import CHOICES, EXPERTS, make_tiny_mixture
from vlmrm.errors import ConfigError
from vlmrm.formats.openai import read_conversation
from vlmrm.modeling import batcher_for, load_for_training
from vlmrm.modeling.experts import Routers, balance_loss, find_routers
from vlmrm.rendering import Renderer

BATCHINGS = ("reference", "shared")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_tiny_mixture(tmp_path_factory.mktemp("mixture") / "qwen3_vl_moe")


@pytest.fixture(scope="module")
def batches(mixture):
    """The padded and the shared batch of answers to two prompts, under each other's prompts too, in float64."""
    processor = AutoProcessor.from_pretrained(mixture)
    model = load_for_training(mixture, dtype=torch.float32, attn_implementation="sdpa")
    model.proved = True
    rendered = [Renderer(processor).render(read_conversation(c)) for c in CASES["irrelevant branches"]]
    padded, shared = (in_type(batcher_for(model, processor, it)(rendered), torch.float64) for it in BATCHINGS)
    assert shared["input_ids"].numel() < padded["attention_mask"].sum() / 2
    return padded, shared


def opened(mixture, batching="shared", **checkpointing):
    model = load_for_training(mixture, dtype=torch.float32, attn_implementation="sdpa", seed=1).double()
    model.set_experts_implementation("eager")
    model.proved = True
    batcher_for(model, AutoProcessor.from_pretrained(mixture), batching)
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    return model.train()


def balanced(model, inputs):
    """The balance loss of a forward, its gradients by name, and the routers' decisions."""
    routers = Routers(find_routers(model))
    with rounding_nowhere():
        with routers.watching(inputs) as decisions:
            model(**inputs)
        loss = balance_loss(decisions)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, decisions


def library_loss(model, inputs):
    """The loss as transformers computes it, over the padded batch, and its gradients."""
    outputs = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    with rounding_nowhere():
        model(**inputs)
        loss = load_balancing_loss_func(tuple(outputs), EXPERTS, CHOICES, inputs["attention_mask"])
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(result, expected):
    (loss, gradients), (expected_loss, expected_gradients) = result[:2], expected[:2]
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    assert any(name.endswith("gate.weight") for name in gradients)
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-16, name


@pytest.fixture(scope="module")
def expected(mixture, batches):
    return library_loss(opened(mixture, "reference"), batches[0])


def test_a_shared_batch_has_the_padded_balancing_loss(mixture, batches, expected):
    assert_same(balanced(opened(mixture, "reference"), batches[0]), expected)
    assert_same(balanced(opened(mixture), batches[1]), expected)


def test_under_gradient_checkpointing(mixture, batches, expected):
    assert_same(balanced(opened(mixture, use_reentrant=False), batches[1]), expected)


def test_without_gradients_it_is_refused(mixture, batches):
    with pytest.raises(ConfigError, match="router_aux_loss_coef changes no weight"):
        balanced(opened(mixture, use_reentrant=True), batches[1])
