"""Deleting checkpoints: nothing that was not agreed to, nothing that anybody needs, and never half of one."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.evaluation.keeping import keep_best, plan
from vlmrm.modeling import find_checkpoints, manifest, write_complete
from vlmrm.modeling.manifest import delete_checkpoint


def checkpoint(folder: Path, size: int = 100, base: Path | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"\0" * size)
    if base is not None:
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    write_complete(folder, world_size=1, step=1)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished training with three checkpoints."""
    for step in (1, 2, 3):
        checkpoint(tmp_path / "run" / f"checkpoint-{step}", size=100 * step)
    checkpoint(tmp_path / "run" / "final")
    return tmp_path / "run"


def at_terminal(monkeypatch, answer: str) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)


def left(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def split(run: Path, *kept: str) -> tuple[list[Path], list[Path]]:
    return find_checkpoints(run), [run / name for name in kept]


def test_the_others_go_after_a_yes_and_after_nothing_else(run, monkeypatch, capsys):
    for answer in ("no\n", "y\n", "\n", ""):
        at_terminal(monkeypatch, answer)
        keep_best(*split(run, "checkpoint-2"), yes=False)
        assert left(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "final"]
    at_terminal(monkeypatch, "yes\n")
    size = sum(file.stat().st_size for step in (1, 3) for file in (run / f"checkpoint-{step}").iterdir())
    keep_best(*split(run, "checkpoint-2"), yes=False)
    assert left(run) == ["checkpoint-2", "final"]
    assert f"Delete 2 checkpoints of {size:,} bytes?" in capsys.readouterr().out


def test_without_a_terminal_yes_must_be_given_beforehand(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    with pytest.raises(ConfigError, match=r"2 checkpoints of .* nothing was deleted, .* no terminal .*--yes true"):
        keep_best(*split(run, "checkpoint-1"), yes=False)
    assert len(left(run)) == 4
    keep_best(*split(run, "checkpoint-1"), yes=True)
    assert left(run) == ["checkpoint-1", "final"]


def test_only_what_was_evaluated_goes(run):
    keep_best([run / "checkpoint-1", run / "checkpoint-2"], [run / "checkpoint-2"], yes=True)
    assert left(run) == ["checkpoint-2", "checkpoint-3", "final"]


def test_what_somebody_needs_stays(run, tmp_path):
    first, second, third = find_checkpoints(run)

    def spared(evaluated=(first, second, third), kept=(second,)) -> dict[str, str]:
        return {path.name: reason for path, reason in plan(evaluated, kept).spared.items()}

    assert spared() == {}
    assert "is the result of a training" in spared([*find_checkpoints(run), run / "final"])["final"]

    (run / "latest").symlink_to("checkpoint-1")
    assert "latest leads into it" in spared()["checkpoint-1"]
    (run / "latest").unlink()
    (tmp_path / "serving").symlink_to(third / "model.safetensors")
    assert "serving leads into it" in spared()["checkpoint-3"]
    (tmp_path / "serving").unlink()

    (run / "checkpoint-4").symlink_to("checkpoint-2")
    assert spared([*find_checkpoints(run)], [run / "checkpoint-4"]) == {}, "the kept one by another name"
    assert first in plan(find_checkpoints(run), [run / "checkpoint-4"]).delete
    assert second not in plan(find_checkpoints(run), [run / "checkpoint-4"]).delete
    assert "it is a link" in spared(find_checkpoints(run), [first])["checkpoint-4"]
    (run / "checkpoint-4").unlink()

    adapter = checkpoint(tmp_path / "lora" / "checkpoint-1", base=first)
    assert "it is the base of" in spared([first, second, adapter], [adapter])["checkpoint-1"]
    inner = checkpoint(third / "inner")
    assert "lies in it" in spared([third, inner], [inner])["checkpoint-3"]
    shutil.rmtree(inner)
    (first / "COMPLETE.json").unlink()
    assert "may still be writing it" in spared()["checkpoint-1"]


def test_a_training_that_has_not_finished_keeps_its_newest_and_its_best(run):
    shutil.rmtree(run / "final")
    evaluated = find_checkpoints(run)
    assert list(plan(evaluated, [run / "checkpoint-2"]).delete) == [run / "checkpoint-1"]
    state = {"best_model_checkpoint": "elsewhere/run/checkpoint-1"}
    (run / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
    found = plan(evaluated, [run / "checkpoint-2"])
    assert not found.delete and "may resume from it or choose it as the best" in found.spared[run / "checkpoint-1"]


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
    assert left(run) == ["checkpoint-2", "checkpoint-3", "final"]


def test_what_cannot_be_deleted_is_said(run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest.os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be deleted .*Permission denied"):
        delete_checkpoint(run / "checkpoint-1")
    assert (run / "checkpoint-1" / "COMPLETE.json").exists()
