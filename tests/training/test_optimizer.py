"""Each part of a model moves at its own learning rate, and an optimizer that cannot run is refused in a sentence."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.families.table import FAMILIES
from tests.runs import SHORT, assert_equal_weights, colour_pairs, logged, weights
from vlmrm import RewardConfig, RewardTrainer
from vlmrm.errors import ConfigError
from vlmrm.modeling import freeze, load_for_training, reward_model_class
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.optimizer import check_optimizer, check_rates, optimizer_bytes, uses_bitsandbytes

RATES = {"learning_rate": 1e-3, "vision_lr": 1e-2, "merger_lr": 3e-2, "head_lr": 1e-1}
# The parts of Qwen2.5-VL, by the names of its weights.
PARTS = {"head_lr": r"score\.", "merger_lr": r"model\.visual\.merger\.", "vision_lr": r"model\.visual\."}


class Recorder(TrainerCallback):
    """Keeps the gradients of each step, and the weights before and after."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(self.trained(model))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        weights = model.named_parameters()
        self.gradients.append({name: w.grad.clone() for name, w in weights if w.grad is not None})

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.weights.append(self.trained(model))

    def trained(self, model) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def rate_key(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return next((key for key, pattern in PARTS.items() if re.match(pattern, name)), "learning_rate")


def decays(name: str) -> bool:
    """HF's rule, for the names of this model: neither biases nor what is called a norm."""
    return not re.search(r"bias|layernorm|(^|\.)norm\.|_norm\.", name)


def by_hand(optim: str, recorded: Recorder) -> dict[str, torch.Tensor]:
    """The weights after the same gradients, by torch's optimizer with groups made by hand, one a weight."""
    moved = {name: weight.clone().requires_grad_() for name, weight in recorded.weights[0].items()}
    rates = {name: RATES[rate_key(name)] for name in moved}
    groups = [
        {"params": [weight], "lr": rates[name], "weight_decay": 0.1 if decays(name) else 0.0}
        for name, weight in moved.items()
    ]
    optimizer = {"sgd": torch.optim.SGD, "adamw_torch": torch.optim.AdamW}[optim](groups)
    for step, gradients in enumerate(recorded.gradients):
        for group, name in zip(optimizer.param_groups, moved, strict=True):
            group["lr"] = rates[name] * (1 - step / len(recorded.gradients))  # HF's linear schedule
            moved[name].grad = gradients.get(name)
        optimizer.step()
    return moved


@pytest.mark.parametrize(
    ("optim", "keys"),
    [
        ("sgd", {}),
        ("adamw_torch", {}),
        ("adamw_torch", {"use_peft": True, "lora_vit": True, "freeze_merger": False}),
        ("adamw_torch", {"use_peft": True, "lora_vit": True, "lora_merger": True, "optim_args": None}),
    ],
)
def test_each_part_moves_with_its_own_rate(tmp_path, tiny_checkpoint, monkeypatch, optim, keys):
    monkeypatch.chdir(tmp_path)
    options = SHORT | RATES | {"max_steps": 2, "max_grad_norm": 0.0, "optim": optim, "weight_decay": 0.1} | keys
    colour_pairs(tmp_path / "data", 4)
    recorder = Recorder()
    args = RewardConfig(output_dir="out", dataset_path=["data/pairs.jsonl"], save_strategy="no", **options)
    trainer = RewardTrainer(tiny_checkpoint, args, callbacks=[recorder])
    trainer.train()
    moved = recorder.weights[-1]
    assert {rate_key(name) for name in moved} == set(RATES)
    for name, expected in by_hand(optim, recorder).items():
        torch.testing.assert_close(moved[name], expected.detach(), atol=1e-7, rtol=1e-6, msg=name)
    [first, last] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {key: first[key] for key in RATES} == RATES
    assert {key: last[key] for key in RATES} == pytest.approx({key: rate / 2 for key, rate in RATES.items()})


def test_a_resumed_run_keeps_groups_with_new_rates(train_here, tmp_path):
    """With adapters of the tower and a merger that trains in full, whose weights and moments come back bit for bit."""
    data = colour_pairs(tmp_path / "data", 6)
    keys = {"use_peft": True, "lora_vit": True, "freeze_merger": False, "max_steps": 4, "save_steps": 2, "bf16": True}
    rates = {"vision_lr": 1e-2, "merger_lr": 1e-3, "head_lr": 1e-4}
    train_here(data, name="whole", **keys, **rates)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    shutil.copytree(tmp_path / "part", tmp_path / "faster")
    train_here(data, name="part", **keys, **rates, resume_from_checkpoint="auto")
    assert_equal_weights(tmp_path / "whole" / "final", tmp_path / "part" / "final")
    # Trained weights are float32, beside a base in bfloat16.
    assert {weight.dtype for weight in weights(tmp_path / "whole" / "final").values()} == {torch.float32}
    train_here(data, name="faster", **keys, **rates | {"vision_lr": 1e-1}, resume_from_checkpoint="auto")
    assert logged(tmp_path / "faster" / "checkpoint-4", "vision_lr")[2:] == pytest.approx([5e-2, 2.5e-2])
    assert logged(tmp_path / "faster" / "checkpoint-4", "head_lr")[2:] == pytest.approx([5e-5, 2.5e-5])
    with pytest.raises(ConfigError, match=r"separate_rates .* was \['vision_lr', 'merger_lr', 'head_lr'\]"):
        train_here(data, name="faster", **keys, vision_lr=1e-2, resume_from_checkpoint="auto")
    with pytest.raises(ConfigError, match="lora_vit was True"):
        train_here(data, name="faster", **keys | {"lora_vit": False}, resume_from_checkpoint="auto")


def rates_of(**keys: float) -> Any:
    return SimpleNamespace(**dict.fromkeys(("vision_lr", "merger_lr", "head_lr")) | keys)


def test_a_rate_for_untrained_parts_is_refused(tiny_checkpoint):
    model = load_for_training(tiny_checkpoint)
    check_rates(rates_of(vision_lr=1e-6, merger_lr=1e-6, head_lr=1e-6), model)
    freeze(model, vit=True)
    check_rates(rates_of(head_lr=1e-6), model)
    for key, part in {"vision_lr": "vision tower", "merger_lr": "merger"}.items():
        with pytest.raises(ConfigError, match=f"{key} is 1e-06, and the {part} is not trained"):
            check_rates(rates_of(**{key: 1e-6}), model)


def test_a_rate_of_an_unknown_merger_is_refused():
    [family] = [family for family in FAMILIES if family.model_type == "gemma4_unified"]
    config = family.make_config(family.make_processor())
    with torch.device("meta"):
        model = reward_model_class(config)(config)
    with pytest.raises(ConfigError, match="merger_lr: Gemma4UnifiedModel has no merger under a known name"):
        check_rates(rates_of(merger_lr=1e-6), model)


@pytest.mark.parametrize(("key", "rate"), [("vision_lr", 0.0), ("merger_lr", -1e-5), ("head_lr", float("nan"))])
def test_a_rate_is_above_zero(tmp_path, key, rate):
    with pytest.raises(ConfigError, match=f"{key} is {rate}: it must be above 0"):
        RewardTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, **{key: rate})


def refusal(tmp_path, written: tuple[str, ...] = ("optim",), **keys) -> str:
    """The sentence that refuses an optimizer."""
    if isinstance(engine := keys.get("deepspeed"), dict):
        (tmp_path / "engine.json").write_text(json.dumps({"train_batch_size": "auto", **engine}))
        keys["deepspeed"] = str(tmp_path / "engine.json")
    args = RewardTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, **keys)
    try:
        check_optimizer(args, written)
        return ""
    except ConfigError as error:
        return str(error)


def test_an_optimizer_the_engine_would_replace_is_refused(tmp_path):
    zero = {"zero_optimization": {"stage": 2}}
    assert refusal(tmp_path, deepspeed=zero, optim="adamw_torch", head_lr=1.0) == ""
    assert "does not work with deepspeed" in refusal(tmp_path, deepspeed=zero, optim="adamw_8bit")
    adam = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    assert refusal(tmp_path, (), deepspeed=zero | adam) == ""
    assert refusal(tmp_path, deepspeed=zero | adam).startswith("optim: the optimizer of deepspeed's configuration")
    schedule = {"scheduler": {"type": "WarmupLR", "params": {}}}
    assert "head_lr: the scheduler of deepspeed's" in refusal(tmp_path, deepspeed=zero | schedule, head_lr=1.0)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "adamw_8bit", "lion_32bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_bytes_match_what_it_keeps(tmp_path, optim, dtype):
    if uses_bitsandbytes(optim):
        pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.ones(1024, 1024, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    args = RewardTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, optim=optim)
    make, options = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = make([weight], **options)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    kept = sum(value.nbytes for value in state) / weight.numel()
    assert kept == pytest.approx(optimizer_bytes(optim, dtype.itemsize), abs=0.02)
