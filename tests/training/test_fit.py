"""What `auto` stands for: chosen by the memory that is free, and the recipes fill their GPUs with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import ROOT, colour_pairs, short_training
from vlmrm.data.comparisons import load_train_and_eval
from vlmrm.modeling.checkpoint import load_processor
from vlmrm.training import fit
from vlmrm.training.arguments import RunArguments
from vlmrm.training.build import build_collator
from vlmrm.training.memory import Memory
from vlmrm.training.survey import survey

# Bytes of a 3B under LoRA, as traced: all but activations, and these by token, with no layer computed twice and all.
BESIDE, NONE, ALL = 8.0e9, 5.14e6, 0.35e6
RECIPES = [path for path in sorted((ROOT / "training_configs").glob("*.yaml")) if "# For " in path.read_text()]


@pytest.fixture
def fitted(tiny_checkpoint, tmp_path, monkeypatch):
    """`fitted(gigabytes, **keys)` is the run whose `auto` was replaced on a GPU of so much memory, and why."""

    def estimate(run, ranks, processor, dataset, rows, inputs) -> Memory:
        each = ALL if run.training.gradient_checkpointing else NONE
        activations = int(each * inputs["input_ids"].numel())
        return Memory(int(BESIDE), 0, 0, activations, 0, activations)

    def choose(gigabytes: float, **keys) -> tuple[RunArguments, str]:
        auto = dict.fromkeys(("gradient_checkpointing", "max_tokens_per_batch"), "auto")
        keys = auto | {"per_device_train_batch_size": 2000} | keys
        run = RunArguments.parse(short_training(tiny_checkpoint, data, tmp_path / "out", **keys), "test")
        processor, dataset = load_processor(tiny_checkpoint), load_train_and_eval(run.data)[0]
        rows = survey(dataset, build_collator(run, processor), 0)
        chosen = fit.fit_into(gigabytes * 1e9, run, 1, processor, dataset, rows)
        chosen.apply(run)
        return run, chosen.why

    monkeypatch.setattr(fit, "estimate_memory", estimate)
    data = colour_pairs(tmp_path / "data", 6)
    return choose


@pytest.mark.parametrize(
    ("gigabytes", "twice", "every", "tokens"),
    [(12, True, 1, 8000), (24, True, 2, 4954), (80, False, None, 12451), (141, False, None, 16384)],
)
def test_layers_and_tokens_follow_from_the_free_memory(fitted, gigabytes, twice, every, tokens):
    """The fewest layers twice with 4,096 tokens; 8 of 90 % of the memory are taken, and half the layers keep half."""
    run, why = fitted(gigabytes)
    assert run.training.gradient_checkpointing is twice
    assert (run.training.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1 if twice else None) == every
    room = 0.9 * gigabytes * 1e9 - BESIDE
    least = {None: NONE, 1: ALL, 2: ALL + (NONE - ALL) / 2}[every]
    assert min(room / least, 16384) == pytest.approx(tokens, rel=0.01)
    limit = run.model.max_tokens_per_batch
    assert isinstance(limit, int) and 1 < limit / tokens < 5  # in tokens and patches, four of an image's token
    assert f"{limit:,} tokens and patches" in why and f"{gigabytes} GB free" in why
    assert (f"{fit.TWICE[every or 0]} is computed twice") in why


def test_what_is_written_stays(fitted):
    run, why = fitted(24, gradient_checkpointing=False)
    assert run.training.gradient_checkpointing is False and "twice" not in why
    run, why = fitted(24, max_tokens_per_batch=5000, per_device_train_batch_size=1)
    assert (run.training.gradient_checkpointing, run.model.max_tokens_per_batch) == (False, 5000)  # a row is short
    assert fit.fit(fitted(80)[0], 1, None, None, None) is None  # ty: ignore[invalid-argument-type]


def test_a_step_is_cut_evenly(fitted, monkeypatch):
    of, samples = fit.Sample.of, []
    monkeypatch.setattr(fit.Sample, "of", lambda *run: samples.append(of(*run)) or samples[-1])
    limit, step = fitted(141, per_device_train_batch_size=400)[0].model.max_tokens_per_batch, 400 * samples[0].row
    assert 16384 < step < 2 * 16384 and limit / samples[0].size == pytest.approx(1.1 * step / 2, rel=0.001)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fills_its_gpu(recipe: Path):
    """By its header, which `python docs/memory.py` traces."""
    words = " ".join(recipe.read_text().replace("#", " ").split())
    found = re.search(r"For (?:one|\d+) GPUs? of (\d+) GB \(estimated.*?\): .*?: ([\d.]+) GB(?: in each)?\.", words)
    assert found is not None, words[:400]
    assert 0.6 <= float(found[2]) / float(found[1]) <= 0.95
