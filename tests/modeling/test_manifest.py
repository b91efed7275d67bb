"""A checkpoint counts only when every file it lists is there, whole."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vlmrm.errors import CheckpointError
from vlmrm.modeling import find_checkpoints, newest_complete, verify_complete, write_complete


def checkpoint(output: Path, step: int) -> Path:
    folder = output / f"checkpoint-{step}"
    (folder / "global_step").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "global_step" / "optimizer.pt").write_bytes(b"moments")
    write_complete(folder, world_size=2, step=step)
    return folder


def test_complete_lists_every_file_with_its_size(tmp_path):
    folder = checkpoint(tmp_path, 4)
    assert verify_complete(folder) == {
        "world_size": 2,
        "step": 4,
        "files": {"global_step/optimizer.pt": 7, "model.safetensors": 7},
    }
    # Written again, it does not list itself or anything left of its own writing.
    write_complete(folder, world_size=1, step=4)
    assert set(verify_complete(folder)["files"]) == {"global_step/optimizer.pt", "model.safetensors"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "global_step/optimizer.pt").unlink(), "global_step/optimizer.pt is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w"), "has 1 bytes instead of 7"),
        (lambda folder: (folder / "COMPLETE.json").unlink(), "has no COMPLETE.json"),
        (lambda folder: (folder / "COMPLETE.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "COMPLETE.json").write_text("[]"), "cannot be read"),
    ],
)
def test_damage_is_named_and_passed_over(tmp_path, caplog, damage, said):
    older, newest = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    assert newest_complete(tmp_path) == newest
    damage(newest)
    with pytest.raises(CheckpointError, match=said):
        verify_complete(newest)
    with caplog.at_level(logging.WARNING, "vlmrm"):
        assert newest_complete(tmp_path) == older
    assert "passing over checkpoint-10" in caplog.text
    assert said in caplog.text


def test_checkpoints_come_in_natural_order(tmp_path):
    for step in (100, 9, 20):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-5").write_text("a file")
    assert [folder.name for folder in find_checkpoints(tmp_path)] == [
        "checkpoint-9",
        "checkpoint-20",
        "checkpoint-100",
    ]
    assert [folder.name for folder in find_checkpoints(tmp_path, "checkpoint-?0")] == ["checkpoint-20"]


def test_nothing_to_resume(tmp_path):
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        verify_complete(tmp_path / "absent")
