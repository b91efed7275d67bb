"""FSDP2: processes that share out the weights train as one process that holds them all."""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.runs import (
    ROOT,
    assert_equal_weights,
    colour_lists,
    judged_further,
    largest_difference,
    logged,
    short_training,
    text_pairs,
    weights,
    write_rows,
)
from vlmrm.modeling import load_checkpoint

# A tower with its merger; states that fork; weights that a batch need not reach, and a merger that the backbone runs.
FAMILIES = ("qwen2_5_vl", "qwen3_5", "llama4")


def mixed_rows(folder: Path) -> Path:
    """Write ranked lists about pictures and pairs of texts, in turns: ranks see one, the other or both."""
    lists = colour_lists(folder, 8).read_text().splitlines()
    texts = text_pairs(folder, 8).read_text().splitlines()
    rows = [json.loads(line) for pair in zip(lists, texts, strict=True) for line in pair]
    return write_rows(folder / "mixed.jsonl", rows)


def run_sharded(folder: Path, families: Sequence[str], runs: Sequence[Sequence[str]], world: int = 2) -> str:
    """Run `sharded_ranks` in processes that are copies of this one and its imports; return what they said."""
    from tests.training import sharded_ranks

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=sharded_ranks.run, args=(rank, world, port, folder, families, runs), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=300)
    said = "".join((folder / f"rank{rank}.txt").read_text() for rank in range(world))
    assert [process.exitcode for process in ranks] == [0] * world, said
    return said


def test_sharded_training_is_that_of_one_process(tmp_path, tiny_checkpoint, train_here):
    data = mixed_rows(tmp_path / "data")
    keys = {
        "use_irrelevant_queries": True,
        "max_tokens_per_batch": 120,
        "max_steps": 4,
        "save_steps": 2,
        "lr_scheduler_type": "constant",
    }
    keys |= {"gradient_checkpointing": True, **judged_further(data)}
    sharded = {**keys, "fsdp": True, "per_device_train_batch_size": 1}
    half_way = tmp_path / "whole" / "checkpoint-2"
    half = {"fsdp": True, "fsdp_config": ROOT / "fsdp2.json", "bf16": True, "freeze_vit": True, "max_steps": 1}
    runs = [
        short_training(tiny_checkpoint, data, tmp_path / "whole", **sharded),
        short_training(tiny_checkpoint, data, tmp_path / "resumed", resume_from_checkpoint=half_way, **sharded),
        short_training(tiny_checkpoint, data, tmp_path / "half", **half),
        short_training(tiny_checkpoint, data, tmp_path / "adapter", use_peft=True, **half),
    ]
    said = run_sharded(tmp_path, FAMILIES, runs)
    assert all(f"{family} equal" in said for family in FAMILIES)

    alone = train_here(data, "alone", gradient_accumulation_steps=2, per_device_train_batch_size=1, **keys).model_dir
    assert logged(tmp_path / "whole" / "checkpoint-4", "loss") == pytest.approx(
        logged(alone.parent / "checkpoint-4", "loss"), rel=1e-5
    )
    assert largest_difference(tmp_path / "whole" / "final", alone) < 5e-4  # Adam, whose steps are of one size, 1e-3
    assert_equal_weights(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")

    held = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("RUN ")]
    assert len(held) == 2 * len(runs)
    assert all(run["share"] < 0.52 for run in held)
    # In bfloat16 too the head computes in float32, with weights that were not rounded.
    assert all(run["head"] == ["torch.float32"] for run in held)
    for name in ("whole", "half", "adapter"):
        loaded = load_checkpoint(tmp_path / name / "final")
        assert loaded.model.score.weight.dtype == torch.float32
    assert all("lora_" in name or name.endswith("score.weight") for name in weights(tmp_path / "adapter" / "final"))


def test_one_process_computes_in_half_precision_beside_float32_weights(tmp_path, tiny_checkpoint, train_here):
    data = mixed_rows(tmp_path / "data")
    keys = {"bf16": True, "max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 4}
    half = {**keys, "fsdp": True}
    said = run_sharded(tmp_path, (), [short_training(tiny_checkpoint, data, tmp_path / "one", **half)], world=1)
    [held] = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("RUN ")]
    assert held == {"share": 1.0, "head": ["torch.float32"], "hidden": "torch.bfloat16"}
    trained = weights(tmp_path / "one" / "final")
    assert any((weight != weight.bfloat16()).any() for name, weight in trained.items() if ".q_proj." in name)
    alone = train_here(data, "alone", **keys).model_dir.parent / "checkpoint-4"  # float32 weights under autocast
    assert logged(tmp_path / "one" / "checkpoint-4", "loss") == pytest.approx(logged(alone, "loss"), abs=0.02)
