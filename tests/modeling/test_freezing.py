"""Frozen parts do not train, and a frozen vision tower keeps no activations."""

from __future__ import annotations

import weakref

import pytest
import torch
from peft import get_peft_model
from samples import SAMPLES, batch_of
from transformers import AutoProcessor

from vlmrm.errors import ConfigError
from vlmrm.modeling import ModelArguments, freeze, load_for_training, lora_config, make_tiny


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


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        ({"vit": True}, ["model.visual"]),  # only what reads text is left to train
        (
            {"vit": True, "merger": False},
            ["model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"],
        ),
        ({"merger": True}, ["model.visual.merger", "model.visual.deepstack_merger_list"]),
        ({"merger": False}, []),
        ({"vit": True, "merger": True}, ["model.visual"]),
        ({"llm": True}, ["model.language_model"]),
        ({"vit": True, "llm": True}, ["model"]),
        ({}, []),
    ],
)
def test_freezes_what_it_is_told_to(tmp_path, arch, parts, prefixes):
    model = load_for_training(make_tiny(tmp_path / arch, arch=arch))
    freeze(model, **parts)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {
        name for name, _ in model.named_parameters() if any(name.startswith(f"{prefix}.") for prefix in prefixes)
    }


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


@CHECKPOINTING
def test_a_frozen_tower_with_a_trained_merger_keeps_only_the_mergers(tiny_checkpoint, checkpointing):
    batch = batch_of(AutoProcessor.from_pretrained(tiny_checkpoint), SAMPLES[:4])
    model = load_for_training(tiny_checkpoint)
    media = model._media_of(dict(batch))["image"]
    freeze(model, vit=True, merger=False)
    prepare(model, checkpointing)
    with_merger = kept_bytes(lambda: model.vision_features("image", media))
    merger = model.model.visual.merger
    patches = batch["pixel_values"].shape[0]
    alone = kept_bytes(lambda: merger(torch.zeros(patches, model.config.vision_config.hidden_size)))
    # Beside the merger's own: at most the indices that put the images' features in order.
    assert alone <= with_merger <= alone + 8 * patches
    model(**batch).logits.sum().backward()
    assert all(weight.grad is not None for weight in merger.parameters())
    assert not any(weight.grad is not None for weight in model.model.visual.blocks.parameters())


def test_an_error_in_a_frozen_tower_leaves_gradients_on(tiny_checkpoint):
    model = load_for_training(tiny_checkpoint)
    freeze(model, vit=True)
    with pytest.raises(RuntimeError):
        model.model.visual.patch_embed(torch.zeros(1, 7))
    assert torch.is_grad_enabled()


def test_only_the_head_is_left(tiny_checkpoint):
    batch = batch_of(AutoProcessor.from_pretrained(tiny_checkpoint), SAMPLES[:4])
    model = load_for_training(tiny_checkpoint, head="mlp")
    freeze(model, vit=True, llm=True)
    model(**batch).logits.sum().backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {"score.weight", "score_hidden.0.weight", "score_hidden.0.bias"}


def test_an_unknown_part_is_refused_by_name():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.ModuleDict({"eyes": torch.nn.Linear(1, 1), "mouth": torch.nn.Linear(1, 1)})

    with pytest.raises(ConfigError, match=r"freeze_vit.*only eyes, mouth: remove freeze_vit"):
        freeze(Odd(), vit=True)


def test_a_merger_under_an_unknown_name_is_not_left_training():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.ModuleDict({"visual": torch.nn.Linear(1, 1), "bridge": torch.nn.Linear(1, 1)})

    with pytest.raises(
        ConfigError, match=r"freeze_vit.*has no merger.*only visual, bridge: write freeze_merger: false"
    ):
        freeze(Odd(), vit=True)
    odd = Odd()
    freeze(odd, vit=True, merger=False)
    assert {name for name, weight in odd.named_parameters() if weight.requires_grad} == {
        "model.bridge.weight",
        "model.bridge.bias",
    }
