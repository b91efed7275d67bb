"""Adapters of tower and merger, and a merger that trains in full beside adapters, train, are saved and come back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.families.cases import CASES
from tests.families.table import FAMILIES
from vlmrm.batching.media import blank_image
from vlmrm.errors import ConfigError
from vlmrm.modeling import (
    ModelArguments,
    batcher_for,
    freeze,
    load_checkpoint,
    load_for_training,
    load_processor,
    load_weights,
    lora_config,
    merge,
    save_reward_files,
    write_complete,
)
from vlmrm.modeling.manifest import weights_digest
from vlmrm.modeling.parts import part_of, trained_by_part
from vlmrm.rendering import Renderer

WEIGHTS = "adapter_model.safetensors"
# A merger inside the tower, with a list of more; mergers beside it, of which Gemma 3's has no linear layer.
NAMES = ("qwen2_5_vl", "qwen3_vl_moe", "llava", "gemma3")
WAYS = {
    "all adapted": {"lora_vit": True, "lora_merger": True},
    "merger in full": {"lora_vit": True, "freeze_merger": False, "freeze_llm": True},
}


@pytest.fixture(scope="module", params=NAMES)
def base(request, tmp_path_factory) -> Path:
    """A family's tiny reward model with its processor, as a checkpoint to start from."""
    [family] = [family for family in FAMILIES if family.model_type == request.param]
    folder, processor = tmp_path_factory.mktemp(request.param), family.make_processor()
    family.make_model(processor).float().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def adapt(model: Any, seed: int = 1, **keys: Any) -> PeftModel:
    """Put adapters into a model, and move each trained weight, as training does."""
    freeze(model, merger=keys.get("freeze_merger"), llm=keys.get("freeze_llm", False))
    torch.manual_seed(seed)
    adapted = get_peft_model(model, lora_config(ModelArguments(use_peft=True, lora_r=2, lora_alpha=6, **keys), model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return adapted


def save(adapted: PeftModel, folder: Path, base: Path) -> Path:
    adapted.save_pretrained(folder)
    save_reward_files(
        folder, processor=load_processor(base), head="linear", provenance={}, base_digest=weights_digest(base)
    )
    write_complete(folder, world_size=1, step=1)
    return folder


def batch_of(model: Any, base: Path, case: str) -> dict[str, Any]:
    processor = load_processor(base)
    renderer = Renderer(processor)
    return batcher_for(model, processor, "reference")([renderer.render(one) for one in CASES[case]])


def scores(model: Any, base: Path) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch_of(model, base, "two images")).logits[:, 0]


def by_hand(base: Path, adapter: Path) -> torch.Tensor:
    """The scores of the base with every saved weight in its place: W + alpha / r B A, or the trained one itself."""
    model = load_for_training(base)
    weights, saved = dict(model.named_parameters()), load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, tensor in saved.items():
            layer, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
            if not rest:
                weights[layer].copy_(tensor)
            elif rest == "A.weight":
                weights[f"{layer}.weight"].add_(6 / 2 * saved[name.replace("lora_A", "lora_B")] @ tensor)
    return scores(model, base)


def skip_without_layers(base: Path, way: str) -> None:
    if "gemma3" in base.name and WAYS[way].get("lora_merger"):
        pytest.skip("its merger is a matrix")


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_scores_as_the_run_did(base, way, tmp_path):
    skip_without_layers(base, way)
    adapted = adapt(load_for_training(base), **WAYS[way])
    parts = {part for part, weights in trained_by_part(adapted.get_base_model()).items() if weights}
    assert parts == {"vision", "merger", "head"} | ({"language"} if way == "all adapted" else set())
    first, expected = save(adapted, tmp_path / "first", base), scores(adapted, base)
    torch.testing.assert_close(by_hand(base, first), expected, atol=2e-5, rtol=1e-4)
    assert (scores(load_for_training(base), base) - expected).abs().max() > 1e-3

    opened = load_checkpoint(first, check_sight=False)
    torch.testing.assert_close(scores(opened.model, base), expected, atol=1e-6, rtol=1e-6)
    merged = load_checkpoint(merge(first, tmp_path / "merged"), check_sight=False).model
    torch.testing.assert_close(scores(merged, base), expected, atol=2e-5, rtol=1e-4)
    full = {name.removeprefix("base_model.model."): w for name, w in load_file(first / WEIGHTS).items()}
    full = {name: weight for name, weight in full.items() if "lora_" not in name}
    assert any("score" not in name for name in full) == ("freeze_merger" in WAYS[way])
    assert all(torch.equal(weight, merged.get_parameter(name)) for name, weight in full.items())

    other = adapt(load_for_training(base), seed=2, **WAYS[way])
    swapped = load_weights(opened, save(other, tmp_path / "second", base))
    assert swapped is not None
    torch.testing.assert_close(scores(swapped.model, base), scores(other, base), atol=1e-6, rtol=1e-6)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of the trained weights by name, as without adapters around them."""
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("way", WAYS)
def test_every_adapter_trains_and_text_batches_give_zeros(base, way):
    skip_without_layers(base, way)
    plain = load_for_training(base)
    plain(**batch_of(plain, base, "two images")).logits.sum().backward()
    used = {name for name, weight in plain.named_parameters() if weight.grad is not None}
    # What a last deepstack layer adds to an image reaches no later token in a model of as few layers.
    without = {name for name, weight in plain.named_parameters() if name in used and not weight.grad.any()}

    model = load_for_training(base)
    model.touch_vision = blank_image(load_processor(base), model.placeholders)
    adapt(model, **WAYS[way])
    assert model.trains_vision() and model.trains_tower()
    model(**batch_of(model, base, "two images")).logits.sum().backward()
    seen = gradients(model)
    for name, gradient in seen.items():
        layer = re.sub(r"\.lora_[AB]\.default\.|\.modules_to_save\.default\.", ".", name)
        assert (gradient is not None) == (layer in used), name
        assert gradient is None or layer in without or gradient.abs().max() > 0, name
    model.zero_grad()
    model(**batch_of(model, base, "text")).logits.sum().backward()
    for name, gradient in gradients(model).items():
        if part_of(model, name) in ("vision", "merger") and seen[name] is not None:
            assert gradient is not None and not gradient.any(), name


@pytest.mark.parametrize("way", WAYS)
def test_reentrant_checkpointing_keeps_the_gradients_of_the_tower(tiny_checkpoint, way):
    def trained(checkpointing: bool) -> dict[str, torch.Tensor | None]:
        model = load_for_training(tiny_checkpoint)
        adapt(model, **WAYS[way])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        model.train()(**batch_of(model, tiny_checkpoint, "two images")).logits.sum().backward()
        return gradients(model)

    expected, checkpointed = trained(False), trained(True)
    assert expected.keys() == checkpointed.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_vit": True, "freeze_vit": True}, "lora_vit contradicts freeze_vit: true"),
        ({"lora_merger": True, "freeze_merger": True}, "lora_merger contradicts freeze_merger: true"),
        ({"lora_merger": True, "freeze_merger": False}, "freeze_merger: false, which trains it in full"),
        ({"freeze_llm": True, "lora_target_modules": ["q_proj"]}, "lora_target_modules contradicts freeze_llm"),
        ({"freeze_llm": True, "lora_experts": True}, "lora_experts contradicts freeze_llm"),
        ({"lora_vit": True, "vision_cache_dir": "cache"}, "vision_cache_dir: the features"),
        ({"freeze_merger": False, "vision_cache_dir": "cache"}, "vision_cache_dir: the features"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        ModelArguments(use_peft=True, **keys)


def test_what_cannot_be_adapted_is_refused_by_name(tiny_checkpoint, tmp_path):
    model = load_for_training(tiny_checkpoint)
    with pytest.raises(ConfigError, match="use_peft: true adapts nothing with freeze_llm: true"):
        lora_config(ModelArguments(use_peft=True, freeze_llm=True), model)
    adapt(model, lora_vit=True)
    with pytest.raises(ConfigError, match="vision_cache_dir: the features of a trained vision tower"):
        model.use_vision_cache(tmp_path)
