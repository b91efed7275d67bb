"""Frozen parts do not train, and a frozen vision tower keeps no activations."""

from __future__ import annotations

import weakref

import pytest
import torch
from peft import get_peft_model
from transformers import AutoProcessor

from tests.modeling.samples import SAMPLES, batch_of
from vlmrm.errors import ConfigError
from vlmrm.modeling import ModelArguments, freeze, load_for_training, lora_config


class Kept:
    """One tensor that autograd was handed to keep. A plain class, as weak references need one."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def kept_bytes(function) -> int:
    """Return what autograd still keeps after a forward pass, parameters aside; `function` returns its output.

    Checkpointing also hands over the inputs of a block that keeps nothing, and lets them go with the block.
    """
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        saved = Kept(tensor)
        if not isinstance(tensor, torch.nn.Parameter):
            kept.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        output = function()  # whose graph holds what is kept
    total = sum(saved.tensor.numel() * saved.tensor.element_size() for saved in kept)
    del output
    return total


CHECKPOINTING = pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])


def prepare(model, checkpointing):
    """Prepare a model for adapters or gradient checkpointing, as a trainer does."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    model.enable_input_require_grads()
    return model.train()


@CHECKPOINTING
@pytest.mark.parametrize("frozen_by", ["freeze", "lora", "both"])
def test_a_frozen_tower_keeps_no_activations(tiny_checkpoint, checkpointing, frozen_by):
    batch = batch_of(AutoProcessor.from_pretrained(tiny_checkpoint), SAMPLES[:4])
    trained = load_for_training(tiny_checkpoint)
    media = trained._media_of(dict(batch))["image"]
    frozen = load_for_training(tiny_checkpoint)
    if frozen_by != "lora":
        freeze(frozen, vit=True)
    if frozen_by != "freeze":
        get_peft_model(frozen, lora_config(ModelArguments(use_peft=True), frozen))
    kept = [
        kept_bytes(lambda: model.vision_features("image", media))  # noqa: B023
        for model in (prepare(trained, checkpointing), prepare(frozen, checkpointing))
    ]
    assert kept[0] > 0
    assert kept[1] == 0

    frozen(**batch).logits.sum().backward()
    expected = {name for name, weight in frozen.named_parameters() if weight.requires_grad}
    assert {name for name, weight in frozen.named_parameters() if weight.grad is not None} == expected
    assert any("language_model" in name for name in expected)


def test_only_the_head_is_left(tiny_checkpoint):
    batch = batch_of(AutoProcessor.from_pretrained(tiny_checkpoint), SAMPLES[:4])
    model = load_for_training(tiny_checkpoint, head="mlp")
    freeze(model, vit=True, llm=True)
    model(**batch).logits.sum().backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {"score.weight", "score_hidden.0.weight", "score_hidden.0.bias"}


def odd(**parts: torch.nn.Module) -> torch.nn.Module:
    """A model whose parts have names that no family has."""
    model = torch.nn.Module()
    model.model = torch.nn.ModuleDict(parts)
    return model


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("eyes", "mouth"), r"freeze_vit.*only eyes, mouth: remove freeze_vit"),
        (("visual", "bridge"), r"freeze_vit.*has no merger.*only visual, bridge: write freeze_merger: false"),
    ],
)
def test_parts_under_unknown_names_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        freeze(odd(**{name: torch.nn.Linear(1, 1) for name in names}), vit=True)


def test_without_its_merger_an_unknown_model_is_frozen():
    model = odd(visual=torch.nn.Linear(1, 1), bridge=torch.nn.Linear(1, 1))
    freeze(model, vit=True, merger=False)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {"model.bridge.weight", "model.bridge.bias"}
