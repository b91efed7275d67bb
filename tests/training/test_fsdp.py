"""FSDP2: two processes that share out the weights train as one process that holds them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import (
    ROOT,
    assert_equal_weights,
    colour_lists,
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


@pytest.mark.slow
def test_sharded_training_is_that_of_one_process(tmp_path, tiny_checkpoint, train_here):
    data = mixed_rows(tmp_path / "data")
    keys = {
        "use_irrelevant_queries": True,
        "max_tokens_per_batch": 120,
        "max_steps": 4,
        "save_steps": 2,
        "lr_scheduler_type": "constant",
    }
    keys |= {"gradient_checkpointing": True}
    sharded = {**keys, "fsdp": True, "per_device_train_batch_size": 1}
    half = {"fsdp": True, "fsdp_config": ROOT / "fsdp2.json", "bf16": True, "max_steps": 1}
    runs = [
        short_training(tiny_checkpoint, data, tmp_path / "whole", **sharded),
        short_training(tiny_checkpoint, data, tmp_path / "resumed", **sharded | {"max_steps": 2}),
        short_training(tiny_checkpoint, data, tmp_path / "resumed", resume_from_checkpoint="auto", **sharded),
        short_training(tiny_checkpoint, data, tmp_path / "half", **half),
        short_training(tiny_checkpoint, data, tmp_path / "adapter", use_peft=True, **half),
    ]
    program = Path(__file__).with_name("sharded_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launch += [program, json.dumps([FAMILIES, runs])]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(f"{family} equal" in done.stdout for family in FAMILIES)

    alone = train_here(data, "alone", gradient_accumulation_steps=2, per_device_train_batch_size=1, **keys).model_dir
    assert logged(tmp_path / "whole" / "checkpoint-4", "loss") == pytest.approx(
        logged(alone.parent / "checkpoint-4", "loss"), rel=1e-5
    )
    assert largest_difference(tmp_path / "whole" / "final", alone) < 1e-4  # Adam, whose steps are of one size
    assert_equal_weights(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")

    said = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("RUN ")]
    assert len(said) == 2 * len(runs)
    assert all(run["share"] < 0.52 for run in said)
    # In bfloat16 too the head computes in float32, with weights that were not rounded.
    assert all(run["head"] == ["torch.float32"] for run in said)
    for name in ("whole", "half", "adapter"):
        loaded = load_checkpoint(tmp_path / name / "final")
        assert loaded.model.score.weight.dtype == torch.float32
    assert all("lora_" in name or name.endswith("score.weight") for name in weights(tmp_path / "adapter" / "final"))
