"""Downloaded checkpoints load with their backbone intact, and ours keep their names on disk."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSequenceClassification, AutoProcessor

from tests.modeling.samples import scores, tiny_llava
from vlmrm.modeling import families, load_for_training, make_tiny, reward_model
from vlmrm.modeling.tiny import ARCHITECTURES


def assert_same_backbone(model, language_model):
    expected = language_model.state_dict()
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith("score")}
    assert set(weights) == {name for name in expected if not name.startswith("lm_head")}
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_backbone_is_the_checkpoints_own(tmp_path, arch):
    folder = make_tiny(tmp_path / arch, arch=arch)
    assert_same_backbone(load_for_training(folder), AutoModelForImageTextToText.from_pretrained(folder))


def test_names_of_downloaded_checkpoints_load_too(tiny_checkpoint, tmp_path):
    """The hub's Qwen2-VL and Qwen2.5-VL files call the parts `visual.` and `model.`."""
    folder = tmp_path / "hub"
    folder.mkdir()
    shutil.copy(tiny_checkpoint / "config.json", folder)
    weights = load_file(tiny_checkpoint / "model.safetensors")
    old = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): weight
        for name, weight in weights.items()
    }
    assert {"visual", "model"} <= {name.split(".")[0] for name in old}
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_backbone(load_for_training(folder), AutoModelForImageTextToText.from_pretrained(tiny_checkpoint))


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_names_on_disk_are_the_names_in_memory(tiny_checkpoint, tmp_path, head):
    """The trainer resumes with a plain `load_state_dict(..., strict=False)`: another name would be left out."""
    model = load_for_training(tiny_checkpoint, head=head)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(model.state_dict())


def test_checkpoints_open_with_transformers_alone_and_suit_vllm(tiny_checkpoint, tmp_path):
    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    model = load_for_training(tiny_checkpoint)
    model.save_pretrained(tmp_path)
    again, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(scores(again, processor), scores(model, processor))

    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen2_5_VLForSequenceClassification"]
    assert config.num_labels == 1 and config.problem_type == "regression"
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["score.weight"].shape == (1, 128)
    assert "score.bias" not in weights


def test_other_architectures_use_the_factory_and_say_so(tmp_path, caplog, monkeypatch):
    monkeypatch.delitem(families.BY_MODEL_TYPE, "llava")
    reward_model._class_for.cache_clear()
    language_model = AutoModelForImageTextToText.from_config(tiny_llava())
    language_model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "vlmrm"):
        model = load_for_training(tmp_path).eval()
        load_for_training(tmp_path)
    assert caplog.text.count("using the generic factory for llava") == 1
    assert_same_backbone(model, language_model)

    images = torch.randn(2, 3, 28, 28, generator=torch.manual_seed(0))
    ids = torch.tensor([[49, 49, 49, 49, 1, 2, 3], [49, 49, 49, 49, 4, 5, 0]])
    mask = torch.tensor([[1] * 7, [1] * 6 + [0]])
    with torch.no_grad():
        both = model(input_ids=ids, attention_mask=mask, pixel_values=images).logits
        second = model(input_ids=ids[1:, :6], pixel_values=images[1:]).logits
    torch.testing.assert_close(both[1:], second, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_for_training(tmp_path / "saved").score.weight, model.score.weight)
