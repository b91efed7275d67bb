"""What a training step logs, and comparisons over the token budget: scored ahead in pieces, and then once more."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from benchmarks import flops
from benchmarks.shapes import Pair, configuration, reward_model, training
from tests.families.reference import rounding_nowhere
from tests.runs import colour_lists, largest_difference
from vlmrm.training import fit, main, step
from vlmrm.training.build import build_model
from vlmrm.training.losses import Objective
from vlmrm.training.step import Operations


def test_figures_count_pairs_that_people_judged():
    """Of five pairs the third is a tie, the fourth a minority's, and the fifth of another prompt."""
    names = ("tie", "outvoted", "irrelevant")
    pairs = {name: torch.arange(5) == 2 + i for i, name in enumerate(names)}
    pairs |= {"chosen": torch.tensor([0, 1, 2, 1, 3]), "rejected": torch.tensor([1, 2, 3, 0, 0])}
    pairs |= {"output": torch.zeros(5, dtype=torch.long), "target": torch.full([5], torch.nan)}
    figures = step.StepFigures(Objective())
    part: dict = {"pairs": pairs, "rows": {"branches": torch.tensor([3])}}
    figures.add(torch.tensor([[3.0], [1.0], [2.0], [0.0]]), part, {}, torch.tensor(0.0))
    figures.read()
    logged = figures.flush(Accelerator(cpu=True))
    assert (logged["accuracy"], logged["margin"], logged["irrelevant_margin"]) == (0.5, 0.5, -3.0)
    assert (logged["mean_reward"], logged["min_reward"], logged["max_reward"]) == (2.0, 1.0, 3.0)


def test_dropout_is_drawn_again_under_autocast_and_checkpointing(train_here, tmp_path, monkeypatch):
    ahead, behind = [], []
    score, with_gradient = step.TrainingStep._score, step.with_gradient

    def record_ahead(self, model, inputs):
        ahead.append(score(self, model, inputs))
        return ahead[-1]

    def record_behind(scores, **keys):
        behind.append(scores.detach())
        return with_gradient(scores, **keys)

    monkeypatch.setattr(step.TrainingStep, "_score", record_ahead)
    monkeypatch.setattr(step, "with_gradient", record_behind)
    # An adapter begins as zero: dropout shows once it has learned.
    keys = {"use_peft": True, "disable_dropout": False, "lora_dropout": 0.5, "learning_rate": 0.1}
    keys |= {"bf16": True, "gradient_checkpointing": True, "max_steps": 2}
    train_here(colour_lists(tmp_path / "data", 6), max_tokens_per_batch=1, **keys)
    assert len(torch.cat(ahead)) > 8
    assert torch.equal(torch.cat(ahead), torch.cat(behind))


def test_no_parts_and_no_recomputation_change_the_gradient(train_here, tmp_path, monkeypatch):
    """In float64, whose weights a step of gradient descent changes by the gradient."""
    call = step.TrainingStep.__call__

    def exact(*arguments):
        with rounding_nowhere():
            return call(*arguments)

    monkeypatch.setattr(step.TrainingStep, "__call__", exact)
    monkeypatch.setattr(main, "build_model", lambda *keys: build_model(*keys).double())
    monkeypatch.setattr(fit, "fit", lambda *of: fit.Fit(2, 150, "as the test says"))
    keys = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 1,
    }
    keys |= {"center_rewards_coefficient": 0.01, "per_device_train_batch_size": 4}
    data = colour_lists(tmp_path / "data", 4)
    whole = train_here(data, "whole", **keys).model_dir
    choices = {
        "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        "parts": {"max_tokens_per_batch": 1},
        "auto": {"max_tokens_per_batch": "auto", "gradient_checkpointing": "auto"},
    }
    for name, choice in choices.items():
        assert largest_difference(whole, train_here(data, name, **(keys | choice)).model_dir) < 1e-12, name


def test_every_module_trains_also_under_adapters(train_here, tmp_path, monkeypatch):
    modes, forward = [], step.TrainingStep._run

    def record(self, model, *args, **keys):
        modes.append(all(module.training for module in model.modules()))
        return forward(self, model, *args, **keys)

    monkeypatch.setattr(step.TrainingStep, "_run", record)
    train_here(colour_lists(tmp_path / "data", 6), use_peft=True, max_steps=2)
    assert modes and all(modes)


def test_a_step_s_operations_follow_from_shapes():
    config = configuration("h256")
    model, batcher = reward_model(config)
    model.language_model.requires_grad_(False)
    inputs = batcher(training(config, [Pair(144, 20, 40, 60)] * 2, irrelevant=False).conversations)
    operations = Operations(model.train())
    operations.on = True

    model(**inputs)

    tower = sum(flops.vision(config, grid) for grid in inputs["media"]["image"]["tensors"]["image_grid_thw"].tolist())
    text = flops.of_shared(config, inputs).body - tower
    assert operations.done == pytest.approx(3 * tower + 2 * text, rel=0.1)  # without the merger
