"""Trainings of a mixture of experts: its loss is that of either batching, and LoRA of its experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.mixtures import EXPERTS, LAYERS, make_tiny_mixture
from tests.runs import assert_equal_weights, colour_pairs, logged, weights
from vlmrm.errors import ConfigError
from vlmrm.modeling import ModelArguments, load_checkpoint, load_for_training, lora_config, merge


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return make_tiny_mixture(tmp_path_factory.mktemp("mixture") / "qwen3_vl_moe")


@pytest.fixture
def data(tmp_path) -> Path:
    return colour_pairs(tmp_path / "data", 12)


def test_shared_and_padded_batches_train_the_same_balance(train_here, tmp_path, mixture, data, caplog):
    keys = {"model": mixture, "router_aux_loss_coef": 0.1, "use_irrelevant_queries": True, "save_steps": 2}
    lines = {}
    for batching in ("shared", "reference"):
        train_here(data, batching, batching=batching, max_steps=2, **keys)
        checkpoint = tmp_path / batching / "checkpoint-2"
        lines[batching] = {name: logged(checkpoint, name) for name in ("loss", "loss_router", "grad_norm")}
    assert "batching: reference" not in caplog.text
    for name, values in lines["shared"].items():
        assert values == pytest.approx(lines["reference"][name], rel=1e-3), name
    assert all(0.1 <= value < 0.1 * EXPERTS * 2 for value in lines["shared"]["loss_router"])


def test_router_loss_does_not_depend_on_batch_count(train_here, tmp_path, mixture):
    """One batch, and the same rows in two: a mean, not a sum."""
    losses = []
    for name, accumulated, size in (("one", 1, 2), ("two", 2, 1)):
        rows = colour_pairs(tmp_path / name, 1)
        rows.write_text(rows.read_text() * 2)
        keys = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": size, "max_steps": 1}
        train_here(rows, f"{name}_out", model=mixture, router_aux_loss_coef=0.1, save_steps=1, **keys)
        losses += logged(tmp_path / f"{name}_out" / "checkpoint-1", "loss_router")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_model_without_experts_is_refused(train_here, data):
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef is for mixtures.* Qwen2_5_VLModel has no routers"):
        train_here(data, router_aux_loss_coef=0.01)


def test_adapted_experts_are_saved_resumed_loaded_and_merged(train_here, tmp_path, mixture, data):
    keys = {"model": mixture, "use_peft": True, "lora_experts": True, "lora_r": 2, "lr_scheduler_type": "constant"}
    final = train_here(data, max_steps=2, **keys).model_dir
    train_here(data, "resumed", max_steps=1, save_steps=1, **keys)
    train_here(data, "resumed", max_steps=2, resume_from_checkpoint="auto", **keys)
    assert_equal_weights(tmp_path / "resumed" / "final", final)

    saved = weights(final)
    moved = {name for name, value in saved.items() if "lora_B" in name and value.any()}
    assert sum("experts" in name for name in moved) == 2 * LAYERS  # gate_up_proj and down_proj
    assert any("q_proj" in name for name in moved)
    assert not any("gate.lora" in name or "visual" in name for name in saved)

    adapted, merged = (load_checkpoint(path).model for path in (final, merge(final, tmp_path / "merged")))
    base = load_for_training(mixture, seed=42)
    with torch.no_grad():
        scores = [model(input_ids=torch.arange(20, 60)[None]).logits for model in (adapted, merged, base)]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-6)
    assert not torch.equal(scores[2], scores[0])
    assert not any("lora" in name for name in weights(tmp_path / "merged"))


def targets(mixture, **keys):
    config = lora_config(ModelArguments(use_peft=True, **keys), load_for_training(mixture))
    return config.target_modules, config.target_parameters


def test_experts_and_routers_are_adapted_by_name(mixture):
    def of_each_layer(*names: str) -> list[str]:
        return [f"model.language_model.layers.{i}.mlp.{name}" for i in range(LAYERS) for name in names]

    assert targets(mixture)[1] is None
    assert targets(mixture, lora_experts=True)[1] == of_each_layer("experts.gate_up_proj", "experts.down_proj")
    layers, routers = targets(mixture, lora_target_modules=["gate", "q_proj"])
    assert layers.endswith(r"\.q_proj")
    assert routers == of_each_layer("gate.weight")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_target_modules": ["w_proj"]}, "names w_proj: the language model has .*gate, k_proj"),
        ({"lora_experts": True, "lora_dropout": 0.1}, "lora_dropout cannot be applied to experts"),
    ],
)
def test_what_cannot_be_adapted_is_refused(mixture, keys, message):
    with pytest.raises(ConfigError, match=message):
        targets(mixture, **keys)
