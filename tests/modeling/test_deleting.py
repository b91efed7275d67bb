"""Deleting a checkpoint: never half of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vlmrm.errors import CheckpointError
from vlmrm.modeling import find_checkpoints, manifest, write_complete
from vlmrm.modeling.manifest import delete_checkpoint


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    write_complete(folder, world_size=1, step=1)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished training with three checkpoints."""
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3", "final"):
        checkpoint(tmp_path / "run" / name)
    return tmp_path / "run"


def test_a_kill_leaves_no_half_of_a_checkpoint_under_its_name(run, monkeypatch):
    rmtree = shutil.rmtree

    def killed(folder):
        (Path(folder) / "model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_checkpoint(run / "checkpoint-1")
    assert [folder.name for folder in find_checkpoints(run)] == ["checkpoint-2", "checkpoint-3"]
    assert not list(run.glob(".*/COMPLETE.json"))
    monkeypatch.setattr(manifest.shutil, "rmtree", rmtree)
    checkpoint(run / "checkpoint-1")  # trained again
    delete_checkpoint(run / "checkpoint-1")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3", "final"]


def test_what_cannot_be_deleted_is_said(run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest.os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be deleted .*Permission denied"):
        delete_checkpoint(run / "checkpoint-1")
    assert (run / "checkpoint-1" / "COMPLETE.json").exists()
