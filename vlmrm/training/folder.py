"""The folder of a run, `output_dir`: who trains in it, which checkpoint a restart takes, and which ones go.

A restart needs no hand. Checkpoints that do not verify are set aside under another name, where neither it nor a sweep
finds them again, and it goes on from the newest one that does; a run that never completed one begins anew.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import TrainingArguments

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import exclusive_lock, make_folder, write_json
from vlmrm.modeling.manifest import (
    BEST,
    COMPLETE,
    FINAL,
    TRAINING_LOCK,
    delete_checkpoint,
    find_checkpoints,
    verify_complete,
)

logger = logging.getLogger("vlmrm")

LOCK_SECONDS = 10.0  # the workers of a killed run take this long to notice, and hold its lock until then
OWNER = ".training.json"
INCOMPLETE, DAMAGED = "incomplete", "damaged"
INTERRUPTED = "saving it was interrupted"
AUTO = ("auto", "true")

# Locking -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """The first process of a training, as it writes itself into `output_dir`.

    `since` is in seconds since 1970; `born` tells a process from a later one of the same number.
    """

    host: str
    pid: int
    since: float
    born: str | None

    @classmethod
    def this_process(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), time.time(), _birth(os.getpid()))

    @classmethod
    def read(cls, folder: Path) -> Owner | None:
        """Return the process that last trained in `folder`; None where it is not known."""
        try:
            return cls(**json.loads((folder / OWNER).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    def is_alive(self) -> bool:
        """Return whether the process runs on this machine."""
        return self.host == socket.gethostname() and self.born is not None and _birth(self.pid) == self.born


def _birth(pid: int) -> str | None:
    """Return when a process of this machine started, in ticks; None where it does not run, or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@contextmanager
def output_lock(args: TrainingArguments) -> Generator[None]:
    """Hold `output_dir`, of which the first process locks a file while it trains."""
    folder = Path(str(args.output_dir))
    if args.process_index != 0:
        yield
        return
    make_folder(folder, "output_dir")
    with locked(folder, LOCK_SECONDS):
        write_json(folder / OWNER, asdict(Owner.this_process()), durable=False)
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / OWNER).unlink()


@contextmanager
def locked(folder: Path, wait: float) -> Generator[None]:
    """Hold the lock of a run's folder; on a file system without locks, refuse only a process of this machine."""
    owner = Owner.read(folder)
    holder = f" ({owner})" if owner else ""
    refusal = f"another training is writing into {folder}{holder}: wait for its end, or choose another --output_dir."

    def go_on() -> None:
        if owner is not None and owner.is_alive() and owner.pid != os.getpid():
            raise ConfigError(refusal)
        logger.warning("%s has no file locks: nothing stops a training on another machine from writing there", folder)

    with exclusive_lock(folder / TRAINING_LOCK, refusal, wait=wait, without=go_on):
        yield


def check_unlocked(folder: Path) -> None:
    """Refuse a folder in which another process trains now, without writing into it."""
    if (folder / TRAINING_LOCK).exists():
        with locked(folder, wait=0.0):
            pass


# Restarting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restart:
    """What a run goes on from: a checkpoint, or None for its first step; and the broken ones, with the reason."""

    checkpoint: Path | None
    broken: dict[Path, str]

    def __str__(self) -> str:
        if self.checkpoint is not None:
            return f"goes on from {self.checkpoint}"
        return "begins anew: no checkpoint was ever complete" if self.broken else "begins: no checkpoint yet"


def choose_restart(args: TrainingArguments) -> Restart:
    """Choose what a run goes on from by `resume_from_checkpoint`: a folder, or with `auto` the newest complete one.

    It only reads. A checkpoint that was never complete, or is not any more, is passed over.
    """
    choice = str(args.resume_from_checkpoint or "false")
    output = Path(str(args.output_dir))
    steps = own_checkpoints(output)
    if choice.lower() == "false":
        existing = [path for path in (output / FINAL, output / BEST) if path.exists()] + steps[-1:]
        if existing:
            raise ConfigError(
                f"{output} already holds {existing[-1].name}: continue with --resume_from_checkpoint auto, or choose "
                "another --output_dir."
            )
        return Restart(None, {})
    if choice.lower() not in AUTO:
        return Restart(Path(choice), {folder: INTERRUPTED for folder in steps if not (folder / COMPLETE).exists()})
    newest, broken = None, {}
    for folder in reversed(steps):
        try:
            verify_complete(folder, hashed=newest is None)  # of older ones only sizes: hashing reads every byte
        except CheckpointError as error:
            whole = (folder / COMPLETE).exists()
            broken[folder] = str(error).rstrip(".") if whole else INTERRUPTED
        else:
            newest = newest or folder
    damaged = [folder for folder in broken if (folder / COMPLETE).exists()]
    if newest is None and damaged:
        raise CheckpointError(
            f"{damaged[0]} was complete and no longer verifies ({broken[damaged[0]]}): mend it, or choose another "
            "output_dir."
        )
    return Restart(newest, broken)


def own_checkpoints(output: Path) -> list[Path]:
    """Return the folders `checkpoint-STEP` in order; `checkpoint-8-copy` is the user's."""
    return [folder for folder in find_checkpoints(output) if re.fullmatch(r"checkpoint-\d+", folder.name)]


def set_aside(folder: Path) -> Path:
    """Rename a broken checkpoint, so that nothing takes it for one, and return its new path.

    One that was never complete replaces the last such one: a run that is often killed would else fill the disk.
    """
    was_complete = (folder / COMPLETE).exists()
    target = folder.with_name(f"{DAMAGED if was_complete else INCOMPLETE}-{folder.name}")
    if not was_complete:
        for earlier in folder.parent.glob(f"{INCOMPLETE}-*"):
            delete_checkpoint(earlier)
            logger.info("%s, set aside by an earlier restart, was deleted", earlier.name)
    number = 2
    while target.exists():
        target, number = target.with_name(f"{DAMAGED}-{folder.name}-{number}"), number + 1
    try:
        folder.rename(target)
    except OSError as error:
        raise CheckpointError(f"{folder} is broken and could not be renamed ({error}): remove it.") from error
    return target


def mend(output: Path, restart: Restart) -> None:
    """Set aside the broken checkpoints of a restart, and finish deletions that a killed run began."""
    for leftover in output.glob(".*.deleted"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder, reason in restart.broken.items():
        target = set_aside(folder)
        logger.warning("skipping %s: %s; it is now %s", folder.name, reason, target.name)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete older checkpoints of a run until `limit` are left; never the one just saved, nor the best.

    Those beyond the newest go first: they are of a run that this one left at an earlier step.
    """
    if limit is None:
        return
    kept = {newest.name, Path(best or newest).name}
    steps = own_checkpoints(newest.parent)
    behind = steps.index(newest) + 1
    doomed = [folder for folder in (*steps[behind:], *steps[:behind]) if folder.name not in kept]
    for folder in doomed[: max(len(steps) - limit, 0)]:
        delete_checkpoint(folder)
