"""Which checkpoint a restart takes, which it sets aside, which go, and who may train in a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling import write_complete
from vlmrm.training import folder as folders
from vlmrm.training.folder import check_unlocked, choose_restart, mend, output_lock, rotate, set_aside


def checkpoint(output: Path, step: int, complete: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).write_text(f"{name} of {step}")
    if complete:
        write_complete(folder, world_size=1, step=step)
    return folder


def arguments(output: Path, resume: str = "auto") -> Any:
    return SimpleNamespace(output_dir=str(output), resume_from_checkpoint=resume, process_index=0)


def names(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if path.is_dir())


def test_a_never_complete_checkpoint_is_set_aside(tmp_path):
    first = checkpoint(tmp_path, 4, complete=False)
    restart = choose_restart(arguments(tmp_path))
    assert restart.checkpoint is None and str(restart).startswith("begins anew")
    assert names(tmp_path) == ["checkpoint-4"], "choosing changed something"
    mend(tmp_path, restart)
    assert names(tmp_path) == ["incomplete-checkpoint-4"]
    assert (tmp_path / "incomplete-checkpoint-4/model.safetensors").exists()

    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 8, complete=False)
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-8-mine")
    restart = choose_restart(arguments(tmp_path))
    assert restart.checkpoint == first
    mend(tmp_path, restart)
    # One that is of no use is enough: a run that is killed in every save must not fill the disk.
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8-mine", "incomplete-checkpoint-8"]


def test_a_damaged_checkpoint_is_kept_aside_or_refused(tmp_path, caplog):
    older, newest = checkpoint(tmp_path, 4), checkpoint(tmp_path, 8)
    (newest / "model.safetensors").write_text("model.safetensors oF 8")
    restart = choose_restart(arguments(tmp_path))
    assert restart.checkpoint == older and "bytes of model.safetensors" in restart.broken[newest]
    (older / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-8 was complete and no longer verifies"):
        choose_restart(arguments(tmp_path))
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    with caplog.at_level("WARNING", "vlmrm"):
        mend(tmp_path, restart)
    assert "skipping checkpoint-8" in caplog.text and "it is now damaged-checkpoint-8" in caplog.text
    assert set_aside(checkpoint(tmp_path, 8)) == tmp_path / "damaged-checkpoint-8"  # in place of the earlier one
    assert (tmp_path / "damaged-checkpoint-8/model.safetensors").read_text() == "model.safetensors of 8"


def test_a_run_ending_during_deletion_restarts_cleanly(tmp_path, monkeypatch):
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)

    def killed(folder, *args, **kwargs):
        (Path(folder) / "optimizer.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        rotate(tmp_path / "checkpoint-6", 2, None)
    restart = choose_restart(arguments(tmp_path))
    assert restart.checkpoint == tmp_path / "checkpoint-6" and not restart.broken
    assert names(tmp_path) == [".checkpoint-2.deleted", "checkpoint-4", "checkpoint-6"]
    mend(tmp_path, restart)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(
    ("saved", "limit", "best", "left"),
    [
        (8, 2, None, [6, 8]),
        (8, 1, None, [8]),
        (8, 2, 4, [4, 8]),
        (8, 1, 4, [4, 8]),
        (8, None, None, [2, 4, 6, 8]),
        (4, 2, None, [2, 4]),  # taken up at step 2: those beyond are of the run before
        (4, 1, None, [4]),
    ],
)
def test_rotation_keeps_newest_and_best_whatever_was_touched(tmp_path, saved, limit, best, left):
    for step in (2, 4, 6, 8):
        checkpoint(tmp_path, step)
    os.utime(tmp_path / "checkpoint-2")  # an evaluation wrote into it
    rotate(tmp_path / f"checkpoint-{saved}", limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_a_held_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.0)
    check_unlocked(tmp_path)
    assert not list(tmp_path.iterdir()), "looking wrote into the folder"
    with output_lock(arguments(tmp_path)):
        for hold in (lambda: check_unlocked(tmp_path), output_lock(arguments(tmp_path)).__enter__):
            with pytest.raises(ConfigError, match="another training is writing into"):
                hold()
    check_unlocked(tmp_path)
