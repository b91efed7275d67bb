"""The memory of a training step is traced without numbers, and is what a real step allocates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from tests.runs import short_training, write_rows
from vlmrm.data.comparisons import load_train_and_eval
from vlmrm.modeling import lora_config
from vlmrm.modeling.checkpoint import load_processor
from vlmrm.training import memory
from vlmrm.training.arguments import RunArguments
from vlmrm.training.build import build_collator, build_model
from vlmrm.training.memory import Memory, estimate_memory, heaviest_forward, planned_model, run_step, trace_step
from vlmrm.training.survey import survey


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda run: 10**10)


@pytest.fixture(scope="module")
def opened(tiny_checkpoint, tmp_path_factory):
    """`opened(**keys)` is a run on three pairs, and what `estimate_memory` takes beside it."""
    folder = tmp_path_factory.mktemp("memory")
    for number in range(3):
        Image.effect_noise((280, 252), 50).convert("RGB").save(folder / f"{number}.png")
    rows = [
        {"prompt": "Which?", "chosen": "It is " + "one " * 60, "rejected": "three " * 80, "images": [f"{number}.png"]}
        for number in range(3)
    ]
    data = write_rows(folder / "pairs.jsonl", rows)

    def open_run(model: Path = tiny_checkpoint, **keys: Any) -> tuple[RunArguments, Any, Any, Any]:
        run = RunArguments.parse(short_training(model, data, folder / "out", **keys), "test")
        processor = load_processor(model)
        dataset = load_train_and_eval(run.data)[0]
        return run, processor, dataset, survey(dataset, build_collator(run, processor), 0)

    return open_run


def allocated(events: Any) -> int:
    """Return the most bytes allocated at one time, by the events of torch's own profiler."""
    now = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


CHECKPOINTED = {"gradient_checkpointing": True, "freeze_vit": True}
KEYS = [{}, {**CHECKPOINTED, "freeze_merger": False}, {**CHECKPOINTED, "use_peft": True}]


@pytest.mark.parametrize("keys", KEYS)
def test_a_traced_step_predicts_real_allocations(opened, keys):
    run, processor, dataset, rows = opened(**keys)
    real: Any = build_model(run, processor)
    fake, weights = planned_model(run, torch.float32)
    if run.model.use_peft:
        from peft import get_peft_model

        real = get_peft_model(real, lora_config(run.model, real))
    assert weights == sum(weight.nbytes for weight in real.parameters())
    inputs = heaviest_forward(run, real, processor, dataset, rows)
    assert "layout" in inputs and inputs["input_ids"].shape[0] == 1  # a shared batch
    build_collator(run, processor, fake, dataset)
    for model in (real, fake):
        model.train()
        if run.training.gradient_checkpointing:
            model.gradient_checkpointing_enable(run.training.gradient_checkpointing_kwargs)
    with sdpa_kernel(SDPBackend.MATH), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_step(real, inputs, half=False)  # not by the CPU's fused kernel, which has buffers of its own
    given = sum(leaf.nbytes for leaf in tree_leaves(inputs) if torch.is_tensor(leaf) and leaf.is_floating_point())
    measured = allocated(profiler.profiler.kineto_results.events()) + given
    assert measured > 2 * weights  # mostly activations
    with sdpa_kernel(SDPBackend.MATH):
        assert trace_step(fake, inputs) == pytest.approx(measured, rel=0.02)


def test_a_few_layers_tell_the_memory_of_all(opened, tiny_checkpoint, tmp_path, monkeypatch):
    deep = shutil.copytree(tiny_checkpoint, tmp_path / "deep")
    config = json.loads((deep / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 7, "layer_types": ["full_attention"] * 7}
    config["vision_config"]["depth"] = 5
    (deep / "config.json").write_text(json.dumps(config))
    arguments = opened(deep)
    estimates = []
    for layers in (2, 7):
        monkeypatch.setattr(memory, "FEW", layers)
        estimates.append(estimate_memory(arguments[0], 1, *arguments[1:]))
    of_few, of_all = estimates
    assert of_few.rest == pytest.approx(of_all.rest, rel=0.01)


def test_layers_that_are_not_checkpointed_keep_their_activations(opened):
    def rest(**keys: Any) -> int:
        run, *more = opened(**keys)
        return estimate_memory(run, 1, *more).rest

    every_second = {"activation_checkpointing_kwargs": json.dumps({"every_n_layers": 2})}
    least, middle, most = rest(**CHECKPOINTED), rest(**CHECKPOINTED, **every_second), rest(freeze_vit=True)
    assert least <= middle < most  # of two layers one is kept


def zero(folder: Any, stage: int) -> Any:
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}))
    return path


def test_ranks_share_what_their_engine_shares_out(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "trace_step", lambda model, inputs, share, half: int(1e9 + share * 2419456))

    def estimate(ranks: int, **keys: Any) -> Memory:
        return estimate_memory(opened(**keys)[0], ranks, *opened(**keys)[1:])

    alone = estimate(1)
    assert estimate(4) == alone  # DDP
    two, three = estimate(4, deepspeed=zero(tmp_path, 2)), estimate(4, deepspeed=zero(tmp_path, 3))
    assert two.weights == alone.weights == alone.gradients and two.optimizer == pytest.approx(3 * alone.weights / 4)
    assert two.gradients == three.gradients == pytest.approx(alone.gradients / 4)
    assert three.weights == pytest.approx(alone.weights / 4)
    assert three.rest == pytest.approx(two.rest + alone.weights)  # gathered, as they are fewer than ZeRO-3 keeps


def test_only_the_language_model_counts_in_4_bits(opened):
    plain, quantized = (opened(use_peft=True, load_in_4bit=four)[0] for four in (False, True))
    model, whole = planned_model(plain, torch.float32)
    bits = 8 * (whole - planned_model(quantized, torch.float32)[1])
    linear = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if ".language_model.layers." in name and "_proj." in name and name.endswith("base_layer.weight")
    )
    assert bits / linear == pytest.approx(32 - 4.127, abs=0.001)  # Dettmers et al. 2023, section 3
