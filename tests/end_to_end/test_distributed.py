"""Several processes train as one does: DDP, ZeRO-2, ZeRO-3, and evaluation on the way, on the CPU."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from filelock import FileLock

from tests.runs import (
    ROOT,
    assert_equal_weights,
    colour_lists,
    colour_pairs,
    finish,
    largest_difference,
    logged,
    short_training,
    start,
    text_pairs,
    train,
    words,
)

# What a step of two processes holds together, one process reads in two batches.
TWICE = {"gradient_accumulation_steps": 2}
FIGURES = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward", "num_tokens")


@pytest.mark.parametrize("kind", ["pairs", "lists with irrelevant queries", "streamed"])
def test_two_processes_equal_two_accumulated_batches_bit_for_bit(tmp_path, tiny_checkpoint, train_here, kind):
    keys = {"save_steps": 5}
    if kind == "pairs":
        # The third step of each epoch has one row, and so nothing for the second process.
        data = colour_pairs(tmp_path / "data", 9, weight=[1.0, 0.5, 3.0] * 3)
    elif kind == "streamed":
        data, keys = colour_pairs(tmp_path / "data", 11), {**keys, "streaming": True}
    else:
        data, keys = colour_lists(tmp_path / "data", 11), {**keys, "use_irrelevant_queries": True}
    two = start(
        ["train_rm.py"],
        *short_training(tiny_checkpoint, data, tmp_path / "two", **keys),
        cwd=tmp_path,
        processes=2,
    )
    train_here(data, "one", **TWICE, **keys)
    finish(two)
    assert_equal_weights(tmp_path / "one/final", tmp_path / "two/final")
    single, two = (tmp_path / name / "checkpoint-5" for name in ("one", "two"))
    assert logged(two, "loss") == logged(single, "loss") and len(logged(single, "loss")) == 5
    for name in FIGURES:
        assert logged(two, name) == pytest.approx(logged(single, name), rel=1e-5), name


def test_a_rank_without_images_trains_along(tmp_path, tiny_checkpoint, train_here):
    """Batches of one row: every step has a rank with a picture and one with none, or two of either kind."""
    data = [colour_pairs(tmp_path / "pictures", 6), text_pairs(tmp_path / "texts", 6)]
    keys = {"per_device_train_batch_size": 1, "max_steps": 6, "save_steps": 6}
    two = start(
        ["train_rm.py"], *short_training(tiny_checkpoint, data, tmp_path / "two", **keys), cwd=tmp_path, processes=2
    )
    train_here(data, "one", **TWICE, **keys)
    finish(two)
    single, two = (tmp_path / name / "checkpoint-6" for name in ("one", "two"))
    assert logged(two, "loss") == pytest.approx(logged(single, "loss"), abs=1e-6)
    assert largest_difference(single, two) < 1e-4


def test_evaluation_of_an_uneven_set_is_exact_on_two_processes(tmp_path, tiny_checkpoint, train_here):
    """HF's samplers repeat rows to fill the last batches, and its means are of batches: here every row counts once."""
    data, held_out = colour_pairs(tmp_path / "data", 8), colour_pairs(tmp_path / "eval", 11)
    keys = {"eval_dataset_path": held_out, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_steps": 4}
    two = start(
        ["train_rm.py"], *short_training(tiny_checkpoint, data, tmp_path / "two", **keys), cwd=tmp_path, processes=2
    )
    train_here(data, "one", **TWICE, **keys)
    finish(two)
    single, two = (tmp_path / name / "checkpoint-4" for name in ("one", "two"))
    figures = ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", "pairs")
    for name in (f"eval_{name}" for name in figures):
        assert logged(two, name) == pytest.approx(logged(single, name), abs=1e-7), name
    assert logged(two, "eval_pairs") == [11, 11]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_loses_as_ddp_does_and_its_checkpoint_scores(tmp_path, tiny_checkpoint, train_here, stage):
    data = [colour_pairs(tmp_path / "data", 8), text_pairs(tmp_path / "texts", 4)]
    keys = {"save_steps": 3}
    with FileLock(ROOT / ".cache" / "deepspeed-build.lock"):  # DeepSpeed builds its operator on the first use
        output = train(
            *short_training(
                tiny_checkpoint, data, tmp_path / stage, deepspeed=ROOT / f"{stage}.json", dtype="float32", **keys
            ),
            cwd=tmp_path,
            processes=2,
        )
    result = train_here(data, "one", **TWICE, **keys)
    engine, single = tmp_path / stage / "checkpoint-3", tmp_path / "one/checkpoint-3"
    assert list(engine.glob("global_step3/*optim_states.pt")), f"DeepSpeed did not train:\n{output}"
    assert logged(engine, "loss") == pytest.approx(logged(single, "loss"), abs=1e-6)
    assert largest_difference(tmp_path / stage / "final", result.model_dir) < 1e-4
    assert json.loads((engine / "COMPLETE.json").read_text())["world_size"] == 2

    # Resumed from step 3, it goes where it went.
    (tmp_path / stage / "checkpoint-3").rename(tmp_path / "kept")
    again = tmp_path / "again"
    again.mkdir()
    (tmp_path / "kept").rename(again / "checkpoint-3")
    train(
        *short_training(tiny_checkpoint, data, again, deepspeed=ROOT / f"{stage}.json", dtype="float32", **keys),
        *words(resume_from_checkpoint="auto"),
        cwd=tmp_path,
        processes=2,
    )
    assert_equal_weights(again / "final", tmp_path / stage / "final")


def test_deepspeed_in_one_process_needs_no_launcher(tmp_path, tiny_checkpoint, train_here):
    data = colour_pairs(tmp_path / "data", 8)
    keys = {"save_steps": 3, "max_steps": 3}
    with FileLock(ROOT / ".cache" / "deepspeed-build.lock"):
        train(
            *short_training(
                tiny_checkpoint, data, tmp_path / "zero2", deepspeed=ROOT / "zero2.json", dtype="float32", **keys
            ),
            cwd=tmp_path,
        )
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
def test_ranks_with_more_parts_than_others_train_along(tmp_path, tiny_checkpoint, train_here, deepspeed):
    """Lists of two to four answers under a budget that splits some ranks' batches, and cuts some lists."""
    data = colour_lists(tmp_path / "data", 12)
    keys = {"save_steps": 5, "use_irrelevant_queries": True, "eval_dataset_path": data}
    keys |= {"eval_strategy": "steps", "eval_steps": 5}
    engine = {"deepspeed": ROOT / deepspeed} if deepspeed else {}
    words = short_training(tiny_checkpoint, data, tmp_path / "two", max_tokens_per_batch=90, **keys, **engine)
    with FileLock(ROOT / ".cache" / "deepspeed-build.lock") if deepspeed else nullcontext():
        two = start(["train_rm.py"], *words, cwd=tmp_path, processes=2)
        train_here(data, "one", **TWICE, **keys)
        assert "each is scored once more before its gradient" in finish(two)
    single, two = (tmp_path / name / "checkpoint-5" for name in ("one", "two"))
    for name in ("loss", "margin", "irrelevant_margin", "eval_loss"):
        assert logged(two, name) == pytest.approx(logged(single, name), rel=1e-4, abs=1e-6), name
