"""LoRA adapts the language model alone, its checkpoints score as the run did, and merging changes no score."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import get_peft_model
from runs import colour_pairs
from safetensors.torch import load_file, save_file
from samples import scores

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling import (
    ModelArguments,
    load_checkpoint,
    load_for_training,
    load_processor,
    lora_config,
    make_tiny,
    merge,
    save_reward_files,
    verify_complete,
    write_complete,
)
from vlmrm.modeling.manifest import weights_digest


def save_adapter(folder: Path, base: Path, head: str = "linear") -> torch.Tensor:
    """Saves an adapter whose every weight has been moved, as training does, and returns its scores."""
    processor = load_processor(base)
    model = load_for_training(base, head=head)
    adapted = get_peft_model(model, lora_config(ModelArguments(use_peft=True, lora_r=4), model))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    adapted.save_pretrained(folder)
    save_reward_files(
        folder,
        processor=processor,
        head=head,
        shown={"max_pixels": 9999},
        provenance={"base_model": "tiny"},
        base_digest=weights_digest(base),
    )
    write_complete(folder, world_size=1, step=7)
    return scores(adapted, processor)


def without_base_digest(adapter: Path, folder: Path) -> Path:
    """A copy of an adapter as it was saved before adapters kept the digest of their base."""
    shutil.copytree(adapter, folder)
    info = json.loads((folder / "reward_model.json").read_text())
    del info["base_digest"]
    (folder / "reward_model.json").write_text(json.dumps(info))
    (folder / "COMPLETE.json").unlink()
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("adapter")
    return folder, save_adapter(folder, tiny_checkpoint)


def test_adapts_every_linear_layer_of_the_language_model_and_no_other(tiny_checkpoint):
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
def test_adapter_and_merged_model_score_as_the_run_did(tiny_checkpoint, tmp_path, head):
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


def test_an_adapter_on_a_reward_model_brings_its_own_head(tiny_reward_model, tmp_path):
    expected = save_adapter(tmp_path, tiny_reward_model)
    opened = load_checkpoint(tmp_path)
    torch.testing.assert_close(scores(opened.model, opened.processor), expected, atol=1e-6, rtol=0)


def test_the_base_may_be_named_relatively_and_may_have_moved(tiny_checkpoint, tmp_path, monkeypatch):
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
    folder = Path(shutil.copytree(adapter[0], tmp_path / "headless"))
    weights = load_file(folder / "adapter_model.safetensors")
    del weights["base_model.model.score.weight"]
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "COMPLETE.json").unlink()
    with pytest.raises(CheckpointError, match="has no reward head"):
        load_checkpoint(folder)
    save_file({"v_head.summary.weight": torch.ones(1, 128)}, folder / "value_head.safetensors")
    with pytest.raises(CheckpointError, match=r"trained head in value_head\.safetensors"):
        load_checkpoint(folder)


def test_an_adapter_must_fit_its_base(adapter, tmp_path):
    folder = Path(shutil.copytree(adapter[0], tmp_path / "short"))
    weights = load_file(folder / "adapter_model.safetensors")
    del weights[max(name for name in weights if "lora_A" in name)]
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "COMPLETE.json").unlink()
    with pytest.raises(CheckpointError, match="differ in 1 weights"):
        load_checkpoint(folder)
    forgetful = without_base_digest(adapter[0], tmp_path / "forgetful")
    with pytest.raises(CheckpointError, match="does not fit its base"):
        load_checkpoint(forgetful, base_model_path=make_tiny(tmp_path / "mimo", arch="mimo_vl"))


def test_an_adapter_is_not_scored_on_another_base_of_equal_shape(train_here, tiny_checkpoint, tmp_path):
    base = Path(shutil.copytree(tiny_checkpoint, tmp_path / "base"))
    trained = train_here(colour_pairs(tmp_path / "data", 4), model=base, use_peft=True, max_steps=1).model_dir
    wrong_base = make_tiny(tmp_path / "other", seed=1)
    refused = pytest.raises(CheckpointError, match=r"was trained on other weights than those of .*base_model_path")
    with refused:
        load_checkpoint(trained, base_model_path=wrong_base)
    with refused:
        merge(trained, tmp_path / "merged", wrong_base)

    moved = shutil.copytree(base, tmp_path / "moved")
    (moved / "README.md").write_text("What stands beside the weights changes nothing.")
    load_checkpoint(trained, base_model_path=moved)
    shutil.copy(wrong_base / "model.safetensors", base)
    with refused:
        load_checkpoint(trained)


def test_a_base_of_the_hub_is_opened_at_the_revision_of_the_training(train_here, tmp_path, monkeypatch):
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


def test_an_adapter_that_does_not_know_its_base_says_so(adapter, tmp_path, caplog, monkeypatch):
    folder = without_base_digest(adapter[0], tmp_path / "older")
    with caplog.at_level(logging.WARNING, "vlmrm"):
        load_checkpoint(adapter[0])
        assert "digest of its base" not in caplog.text
        # With nothing to compare them with, tens of gigabytes are not read.
        monkeypatch.setattr("vlmrm.modeling.loading.weights_digest", lambda folder: pytest.fail("it read the base"))
        load_checkpoint(folder)
    assert f"the adapter {folder} was saved without the digest of its base" in caplog.text


def test_adapters_are_merged_before_more_training(adapter):
    with pytest.raises(CheckpointError, match="vlmrm merge"):
        load_for_training(adapter[0])


def test_merge_overwrites_nothing_and_needs_an_adapter(adapter, tiny_reward_model, tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is not empty"):
        merge(adapter[0], tmp_path)
    with pytest.raises(CheckpointError, match="is no adapter"):
        merge(tiny_reward_model, tmp_path / "out")


@pytest.mark.parametrize("wrong", [{"lora_r": 0}, {"lora_alpha": 0}, {"lora_dropout": 1.0}, {"load_in_4bit": True}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ModelArguments(**wrong)
