"""A comparison over the token budget is trained on in pieces as it is in one: through the trainer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from runs import colour_lists, largest_difference, logged

from vlmrm.training import step

FIGURES = ("loss", "loss_irrelevant", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", "grad_norm")


@pytest.fixture
def forwards(monkeypatch):
    """The scores of cut comparisons: those computed ahead, and those with a graph."""
    seen: dict[str, list[torch.Tensor]] = {"ahead": [], "behind": []}
    score, with_gradient = step.TrainingStep._score, step.with_gradient

    def record_ahead(self, model, inputs):
        seen["ahead"].append(score(self, model, inputs))
        return seen["ahead"][-1]

    def record_behind(scores, **keys):
        seen["behind"].append(scores.detach())
        return with_gradient(scores, **keys)

    monkeypatch.setattr(step.TrainingStep, "_score", record_ahead)
    monkeypatch.setattr(step, "with_gradient", record_behind)
    return seen


@pytest.mark.parametrize(("batching", "budget"), [("shared", 80), ("reference", 150)])
def test_steps_and_figures_are_those_without_a_budget(train_here, tmp_path, forwards, monkeypatch, batching, budget):
    """Ranked lists with irrelevant queries: under the budget some batches have whole lists and cut ones."""
    keys = {"batching": batching, "use_irrelevant_queries": True, "center_rewards_coefficient": 0.01}
    # Not Adam, which makes steps of one size of gradients that are mostly rounding.
    keys |= {"gradient_accumulation_steps": 2, "save_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.05}
    monkeypatch.setattr("vlmrm.batching.pieces._logged", set())
    data = colour_lists(tmp_path / "data", 12)
    train_here(data, "whole", **keys)
    assert not forwards["ahead"]
    train_here(data, "pieces", max_tokens_per_batch=budget, **keys)
    assert len(forwards["ahead"]) == len(forwards["behind"]) > 2
    whole, pieces = (tmp_path / name / "checkpoint-2" for name in ("whole", "pieces"))
    for name in FIGURES:
        assert logged(pieces, name) == pytest.approx(logged(whole, name), rel=1e-4, abs=1e-6), name
    assert largest_difference(whole, pieces) < 1e-6
    log = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert log.count("computed in pieces") == 1


def test_dropout_is_drawn_again_under_autocast_and_checkpointing(train_here, tmp_path, forwards):
    # An adapter begins as zero: dropout shows once it has learned.
    keys = {"use_peft": True, "disable_dropout": False, "lora_dropout": 0.5, "learning_rate": 0.1}
    keys |= {"bf16": True, "gradient_checkpointing": True, "max_steps": 2}
    train_here(colour_lists(tmp_path / "data", 6), max_tokens_per_batch=1, **keys)
    ahead, behind = (torch.cat(forwards[name]) for name in ("ahead", "behind"))
    assert len(ahead) > 8
    assert torch.equal(ahead, behind)


def test_figures_are_means_of_judged_pairs():
    """Ties, and pairs that most raters judged the other way, are right or wrong for nobody."""
    figures = step.StepFigures()
    pairs = {"chosen": [0, 2, 0, 1], "rejected": [1, 1, 2, 2], "tie": [0, 0, 1, 0], "outvoted": [0, 0, 0, 1]}
    pairs = {name: torch.tensor(column) for name, column in {**pairs, "irrelevant": [0] * 4}.items()}
    pairs |= {name: pairs[name].bool() for name in ("tie", "outvoted", "irrelevant")}
    part: Any = {"pairs": pairs, "rows": {"branches": torch.tensor([3])}}
    terms = {name: torch.tensor(0.5) for name in ("preference", "irrelevant", "center")}

    figures.add(torch.tensor([2.0, 1.0, 0.0]), part, terms, torch.tensor(0.5))

    logged = figures.flush(Accelerator(cpu=True))
    assert {name: logged[name] for name in ("accuracy", "margin", "mean_reward")} == {
        "accuracy": 0.5,  # the first pair is right by 1, the second wrong by 1
        "margin": 0.0,
        "mean_reward": 1.0,
    }
