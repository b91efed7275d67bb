"""Several processes train as one does: DDP, ZeRO-2, ZeRO-3, and evaluation on the way, on the CPU."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.runs import (
    ROOT,
    assert_equal_weights,
    colour_lists,
    colour_pairs,
    finish,
    judged_further,
    largest_difference,
    logged,
    short_training,
    start,
    text_pairs,
    train,
)

# What a step of two processes holds together, one process reads in two batches.
TWICE = {"gradient_accumulation_steps": 2}
FIGURES = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward", "num_tokens")


@pytest.fixture
def on_one_and_two(tmp_path, tiny_checkpoint, train_here):
    """`on_one_and_two(data, **keys)` trains in one process and in two; it returns their folders and what two said."""

    def run(data, engine: dict | None = None, **keys) -> tuple[Path, Path, str]:
        words = short_training(tiny_checkpoint, data, tmp_path / "two", **keys, **(engine or {}))
        two = start(["train_rm.py"], *words, cwd=tmp_path, processes=2)
        keys.pop("max_tokens_per_batch", None)
        train_here(data, "one", **TWICE, **keys)
        return tmp_path / "one", tmp_path / "two", finish(two)

    return run


@pytest.mark.parametrize("kind", ["pairs", "lists with irrelevant queries"])
def test_two_processes_equal_two_accumulated_batches(tmp_path, on_one_and_two, kind):
    keys = {"save_steps": 5}
    if kind == "pairs":
        # The third step of each epoch has one row, and so nothing for the second process.
        data = colour_pairs(tmp_path / "data", 9, weight=[1.0, 0.5, 3.0] * 3)
    else:
        data, keys = colour_lists(tmp_path / "data", 11), {**keys, "use_irrelevant_queries": True}
    one, two, _ = on_one_and_two(data, **keys)
    assert_equal_weights(one / "final", two / "final")
    single, two = one / "checkpoint-5", two / "checkpoint-5"
    assert logged(two, "loss") == logged(single, "loss") and len(logged(single, "loss")) == 5
    for name in FIGURES:
        assert logged(two, name) == pytest.approx(logged(single, name), rel=1e-5), name


def test_a_rank_without_images_trains_along(tmp_path, on_one_and_two):
    """Batches of one row: every step has a rank with a picture and one with none, or two of either kind."""
    data = [colour_pairs(tmp_path / "pictures", 6), text_pairs(tmp_path / "texts", 6)]
    one, two, _ = on_one_and_two(data, per_device_train_batch_size=1, max_steps=6, save_steps=6)
    single, two = one / "checkpoint-6", two / "checkpoint-6"
    assert logged(two, "loss") == pytest.approx(logged(single, "loss"), abs=1e-6)
    assert largest_difference(single, two) < 1e-4


def test_an_uneven_evaluation_is_exact_on_two_processes(tmp_path, on_one_and_two):
    """HF's samplers repeat rows to fill the last batches, and its means are of batches: here every row counts once."""
    data, held_out = colour_pairs(tmp_path / "data", 8), colour_pairs(tmp_path / "eval", 11)
    keys = {"eval_dataset_path": held_out, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_steps": 4}
    one, two, _ = on_one_and_two(data, **keys)
    single, two = one / "checkpoint-4", two / "checkpoint-4"
    figures = ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", "pairs")
    for name in (f"eval_{name}" for name in figures):
        assert logged(two, name) == pytest.approx(logged(single, name), abs=1e-7), name
    assert logged(two, "eval_pairs") == [11, 11]


def test_zero3_trains_and_resumes_as_ddp_does(tmp_path, tiny_checkpoint, train_here):
    data = [colour_pairs(tmp_path / "data", 8), text_pairs(tmp_path / "texts", 4)]
    keys = {"save_steps": 3}
    sharded = {**keys, "deepspeed": ROOT / "zero3.json", "dtype": "float32"}
    with FileLock(ROOT / ".cache" / "deepspeed-build.lock"):  # DeepSpeed builds its operator on the first use
        first = short_training(tiny_checkpoint, data, tmp_path / "zero3", **sharded)
        output = train(*first, cwd=tmp_path, processes=2)
    result = train_here(data, "one", **TWICE, **keys)
    engine, single = tmp_path / "zero3/checkpoint-3", tmp_path / "one/checkpoint-3"
    assert list(engine.glob("global_step3/*optim_states.pt")), f"DeepSpeed did not train:\n{output}"
    assert logged(engine, "loss") == pytest.approx(logged(single, "loss"), abs=1e-6)
    assert largest_difference(tmp_path / "zero3/final", result.model_dir) < 1e-4
    assert json.loads((engine / "COMPLETE.json").read_text())["world_size"] == 2

    # Resumed from step 3, it goes where it went.
    (tmp_path / "again").mkdir()
    engine.rename(tmp_path / "again/checkpoint-3")
    again = short_training(tiny_checkpoint, data, tmp_path / "again", resume_from_checkpoint="auto", **sharded)
    train(*again, cwd=tmp_path, processes=2)
    assert_equal_weights(tmp_path / "again/final", tmp_path / "zero3/final")


def test_deepspeed_in_one_process_needs_no_launcher(tmp_path, tiny_checkpoint, train_here):
    data = colour_pairs(tmp_path / "data", 8)
    keys = {"save_steps": 3, "max_steps": 3}
    words = short_training(
        tiny_checkpoint, data, tmp_path / "zero2", deepspeed=ROOT / "zero2.json", dtype="float32", **keys
    )
    with FileLock(ROOT / ".cache" / "deepspeed-build.lock"):
        train(*words, cwd=tmp_path)
    train_here(data, "one", **keys)
    engine, single = (tmp_path / name / "checkpoint-3" for name in ("zero2", "one"))
    assert list(engine.glob("global_step3/*optim_states.pt"))
    assert logged(engine, "loss") == pytest.approx(logged(single, "loss"), abs=1e-6)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with a GPU the ranks meet on it")
def test_processes_without_a_gpu_train_together(tmp_path, tiny_checkpoint):
    """Without --use_cpu, HF would start two trainings that each believe to be alone, in one output folder."""
    data = colour_pairs(tmp_path / "data", 4)
    arguments = short_training(tiny_checkpoint, data, tmp_path / "out", max_steps=1)
    position = arguments.index("--use_cpu")
    train(*arguments[:position], *arguments[position + 2 :], cwd=tmp_path, processes=2)
    assert json.loads((tmp_path / "out/final/COMPLETE.json").read_text())["world_size"] == 2


def test_an_engine_that_would_not_run_is_refused(tmp_path, tiny_checkpoint):
    """FSDP on a CPU: HF drops it and trains on as plain DDP, without a word."""
    data = colour_pairs(tmp_path / "data", 4)
    arguments = short_training(tiny_checkpoint, data, tmp_path / "out", fsdp=True)
    output = train(*arguments, cwd=tmp_path, processes=2, code=1)  # torchrun's code; the ranks' own is 2
    assert "error: fsdp does not run on a CPU" in output
    assert not (tmp_path / "out/final").exists()


@pytest.mark.parametrize("deepspeed", [None, "zero2.json", "zero3.json"])
def test_ranks_with_more_parts_than_others_train_along(tmp_path, on_one_and_two, deepspeed):
    """Lists of two to four answers, rated and criticised, under a budget that splits batches and cuts some lists."""
    data = colour_lists(tmp_path / "data", 12)
    keys = judged_further(data) | {"save_steps": 5, "use_irrelevant_queries": True, "eval_dataset_path": data}
    keys |= {"eval_strategy": "steps", "eval_steps": 5, "max_tokens_per_batch": 90}
    engine = {"deepspeed": ROOT / deepspeed} if deepspeed else {}
    with FileLock(ROOT / ".cache" / "deepspeed-build.lock") if deepspeed else nullcontext():
        one, two, output = on_one_and_two(data, engine, **keys)
    assert "each is scored once more before its gradient" in output
    for name in ("loss", "loss_clarity", "loss_critique", "margin", "irrelevant_margin", "eval_loss"):
        expected = logged(one / "checkpoint-5", name)
        assert logged(two / "checkpoint-5", name) == pytest.approx(expected, rel=1e-4, abs=1e-6), name
