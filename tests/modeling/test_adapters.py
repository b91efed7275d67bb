"""LoRA adapts the language model alone, its checkpoints score as the run did, and merging changes no score."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from tests.modeling.samples import save_adapter, scores
from tests.runs import colour_pairs
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling import (
    ModelArguments,
    load_checkpoint,
    load_for_training,
    load_processor,
    lora_config,
    make_tiny,
    merge,
    verify_complete,
)
from vlmrm.training.trainer import adapt


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("adapter")
    return folder, save_adapter(folder, tiny_checkpoint)


def test_adapters_cover_exactly_the_language_model_linear_layers(tiny_checkpoint):
    model = load_for_training(tiny_checkpoint)
    linear = {
        f"{name}.lora_A.default.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "language_model" in name
    }
    get_peft_model(model, lora_config(ModelArguments(use_peft=True), model))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if "lora_A" in name} == linear
    assert {name for name in trained if "lora" not in name} == {"score.modules_to_save.default.weight"}


def test_named_layers_are_those_of_the_language_model(tiny_checkpoint):
    """`gate_proj` is also a layer of the vision tower."""
    model = load_for_training(tiny_checkpoint)
    get_peft_model(model, lora_config(ModelArguments(use_peft=True, lora_target_modules=["gate_proj"]), model))
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {f"model.language_model.layers.{i}.mlp.gate_proj.lora_A.default.weight" for i in range(2)}
    with pytest.raises(ConfigError, match=r"names qkv: the language model has down_proj"):
        lora_config(ModelArguments(lora_target_modules=["qkv"]), load_for_training(tiny_checkpoint))


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_adapter_and_merged_model_score_like_training(tiny_checkpoint, tmp_path, head):
    expected = save_adapter(tmp_path / "adapter", tiny_checkpoint, head)
    plain = load_for_training(tiny_checkpoint, head=head)
    assert (scores(plain, load_processor(tiny_checkpoint)) - expected).abs().max() > 0.01

    opened = load_checkpoint(tmp_path / "adapter")
    torch.testing.assert_close(scores(opened.model, opened.processor), expected, atol=1e-6, rtol=0)

    folder = merge(tmp_path / "adapter", tmp_path / "merged")
    merged = load_checkpoint(folder)
    torch.testing.assert_close(scores(merged.model, merged.processor), expected, atol=1e-5, rtol=1e-4)
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    assert merged.info["head"] == head
    assert merged.info["max_pixels"] == 9999
    assert merged.info["provenance"] == {"base_model": "tiny", "merged_from": "adapter"}
    assert verify_complete(folder)["step"] == 7


def test_an_adapter_on_reward_models_brings_its_head(tiny_reward_model, tmp_path):
    expected = save_adapter(tmp_path, tiny_reward_model)
    opened = load_checkpoint(tmp_path)
    torch.testing.assert_close(scores(opened.model, opened.processor), expected, atol=1e-6, rtol=0)


def test_the_adapter_base_may_be_relative_or_moved(tiny_checkpoint, tmp_path, monkeypatch):
    shutil.copytree(tiny_checkpoint, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    expected = save_adapter(tmp_path / "adapter", Path("base"))
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="base"):
        load_checkpoint(tmp_path / "adapter")
    opened = load_checkpoint(tmp_path / "adapter", base_model_path=tmp_path / "moved")
    torch.testing.assert_close(scores(opened.model, opened.processor), expected, atol=1e-6, rtol=0)
    merged = load_checkpoint(merge(tmp_path / "adapter", tmp_path / "merged", tmp_path / "moved"))
    torch.testing.assert_close(scores(merged.model, merged.processor), expected, atol=1e-5, rtol=1e-4)


def test_an_adapter_without_its_head_is_refused(adapter, tmp_path):
    folder = without_weight(adapter[0], tmp_path / "headless", "base_model.model.score.weight")
    with pytest.raises(CheckpointError, match="has no reward head"):
        load_checkpoint(folder)
    save_file({"v_head.summary.weight": torch.ones(1, 128)}, folder / "value_head.safetensors")
    with pytest.raises(CheckpointError, match=r"trained head in value_head\.safetensors"):
        load_checkpoint(folder)


def test_an_adapter_without_one_weight_is_refused(adapter, tmp_path):
    weight = max(name for name in load_file(adapter[0] / "adapter_model.safetensors") if "lora_A" in name)
    with pytest.raises(CheckpointError, match="differ in 1 weights"):
        load_checkpoint(without_weight(adapter[0], tmp_path / "short", weight))


def without_weight(adapter: Path, folder: Path, name: str) -> Path:
    shutil.copytree(adapter, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    del weights[name]
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "COMPLETE.json").unlink()
    return folder


def test_an_adapter_is_not_scored_on_another_base(train_here, tiny_checkpoint, tmp_path):
    base = Path(shutil.copytree(tiny_checkpoint, tmp_path / "base"))
    trained = train_here(colour_pairs(tmp_path / "data", 4), model=base, use_peft=True, max_steps=1).model_dir
    wrong_base = make_tiny(tmp_path / "other", seed=1)
    refused = pytest.raises(CheckpointError, match=r"was trained on other weights than those of .*base_model_path")
    with refused:
        load_checkpoint(trained, base_model_path=wrong_base)
    with refused:
        merge(trained, tmp_path / "merged", wrong_base)

    load_checkpoint(trained, base_model_path=shutil.copytree(base, tmp_path / "moved"))
    shutil.copy(wrong_base / "model.safetensors", base)
    with refused:
        load_checkpoint(trained)


def test_a_hub_base_opens_at_the_training_revision(train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate({"main": "c0ffee", "v2": "decade"}.items()):
        make_tiny(kept / "snapshots" / commit, seed=seed)
        (kept / "refs" / revision).write_text(commit)
    data = colour_pairs(tmp_path / "data", 4)
    trained = train_here(data, model="org/name", model_revision="v2", use_peft=True, max_steps=1).model_dir
    base = load_for_training(kept / "snapshots" / "decade")
    opened = load_checkpoint(trained).model
    torch.testing.assert_close(opened.get_input_embeddings().weight.float(), base.get_input_embeddings().weight)
    (kept / "refs" / "v2").write_text("c0ffee")
    with pytest.raises(CheckpointError, match="was trained on other weights than those of org/name"):
        load_checkpoint(trained)


def test_adapters_need_no_float32_copy_of_inputs(tiny_checkpoint):
    base = load_for_training(tiny_checkpoint, dtype=torch.bfloat16)
    args: Any = SimpleNamespace(deepspeed_plugin=None, deepspeed=None, bf16=True, fp16=False)
    model, _ = adapt(base, lora_config(ModelArguments(use_peft=True), base), args)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def step() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=torch.arange(2, 40)[None]).logits.square().sum()
        return [loss, *torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad])]

    ours = step()
    for layer in layers:
        assert not layer.cast_input_dtype_enabled
        layer.cast_input_dtype_enabled = True

    assert layers and all(map(torch.equal, ours, step()))


def test_merging_overwrites_nothing_and_needs_an_adapter(adapter, tiny_reward_model, tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is not empty"):
        merge(adapter[0], tmp_path)
    with pytest.raises(CheckpointError, match="is no adapter"):
        merge(tiny_reward_model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="vlmrm merge"):
        load_for_training(adapter[0])


@pytest.mark.parametrize("wrong", [{"lora_r": 0}, {"lora_alpha": 0}, {"lora_dropout": 1.0}, {"load_in_4bit": True}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ModelArguments(**wrong)
