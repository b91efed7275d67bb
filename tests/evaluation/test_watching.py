"""Watching trainings: each whole checkpoint once, until they have finished or nothing comes any more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlmrm.evaluation.sweep import INTERVAL, checkpoints_of, watch
from vlmrm.modeling import write_complete
from vlmrm.modeling.manifest import TRAINING_LOCK


def checkpoint(folder: Path, complete: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    if complete:
        write_complete(folder, world_size=1, step=1)


class Time:
    """A clock that moves only by waiting; what `later` lists happens during its waits, one entry each."""

    def __init__(self, *later: Callable[[], None]):
        self.now, self.later = 0.0, list(later)

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.later:
            self.later.pop(0)()


def watched(time: Time, *model_dirs: Path, timeout: float = 3 * INTERVAL):
    dirs = [str(folder) for folder in model_dirs]
    return watch(dirs, "checkpoint-*", timeout=timeout, wait=time.wait, clock=time.clock)


def test_whole_checkpoints_come_once_until_training_finishes(tmp_path):
    run = tmp_path / "run"
    first, second, third = (run / f"checkpoint-{step}" for step in (9, 10, 100))
    time = Time(
        lambda: checkpoint(first, complete=False),
        lambda: checkpoint(first),
        partial(checkpoint, second),
        lambda: [checkpoint(run / "final", complete=False), checkpoint(third), checkpoint(run / "final")],
    )
    assert list(watched(time, run)) == [first, second, third]
    assert time.now == 4 * INTERVAL, "it ends with the training"


def test_every_training_must_have_finished(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    checkpoint(one / "checkpoint-1")
    checkpoint(one / "best")
    time = Time(lambda: checkpoint(other / "checkpoint-5"), lambda: checkpoint(other / "best"))
    assert list(watched(time, one, other)) == [one / "checkpoint-1", other / "checkpoint-5"]


def test_a_checkpoint_itself_is_not_waited_for(tmp_path):
    checkpoint(tmp_path / "best")
    time = Time()
    assert list(watched(time, tmp_path / "best")) == [tmp_path / "best"] and time.now == 0


def test_a_watch_ends_when_nothing_new_comes(tmp_path, caplog):
    run = tmp_path / "run"
    time = Time(lambda: checkpoint(run / "checkpoint-1"))
    found = watched(time, run)
    assert next(found) == run / "checkpoint-1"
    time.now += 100 * INTERVAL  # evaluating it takes long, which is no waiting
    time.later = [lambda: None, lambda: checkpoint(run / "checkpoint-2")]
    assert next(found) == run / "checkpoint-2"
    assert list(found) == []
    assert "No new checkpoint for 0.75 minutes" in caplog.text


def test_a_sweep_beside_training_skips_unfinished_checkpoints(tmp_path, caplog):
    checkpoint(tmp_path / "checkpoint-1")
    checkpoint(tmp_path / "checkpoint-2", complete=False)
    args: Any = SimpleNamespace(checkpoint_pattern="checkpoint-*")
    both = [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    assert checkpoints_of(str(tmp_path), args) == both  # of a download, no one knows whether it is whole
    (tmp_path / TRAINING_LOCK).touch()
    with caplog.at_level("WARNING", "vlmrm"):
        assert checkpoints_of(str(tmp_path), args) == both[:1]
    assert "checkpoint-2 is left out" in caplog.text
