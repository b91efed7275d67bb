"""The checkpoints of trainings that still run, one after another, as soon as each is whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from vlmrm.modeling.manifest import COMPLETE, find_checkpoints, is_finished

logger = logging.getLogger("vlmrm")

INTERVAL = 15.0  # seconds between looks


def watch(
    model_dirs: Sequence[str],
    pattern: str,
    *,
    timeout: float,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Path]:
    """Every complete checkpoint below `model_dirs`, once, until all the trainings have finished.

    A folder that does not exist yet is waited for; one that is itself a checkpoint counts as finished. Ends also,
    with a warning, when for `timeout` seconds there was none to yield; evaluating one does not count as waiting. All
    ranks get the same checkpoints in the same order: the first looks, and tells the others.
    """
    main = PartialState().is_main_process
    seen: set[Path] = set()
    since = clock()
    while True:
        # Whether a training has finished is asked first: its last checkpoint was whole by then.
        look = (all(map(_finished, model_dirs)), _next(model_dirs, pattern, seen), clock() - since) if main else None
        [(finished, folder, waited)] = broadcast_object_list([look])
        if folder is not None:
            seen.add(folder)
            yield folder
            since = clock()
        elif finished:
            return
        elif waited >= timeout:
            logger.warning("No new checkpoint for %g minutes in %s: waiting no longer", timeout / 60, model_dirs)
            return
        else:
            wait(INTERVAL)


def _next(model_dirs: Sequence[str], pattern: str, seen: set[Path]) -> Path | None:
    """The first complete checkpoint that was not seen yet. Looked for anew each time: a training may delete some."""
    for model_dir in model_dirs:
        for folder in find_checkpoints(model_dir, pattern) or [Path(model_dir)]:
            if folder not in seen and (folder / COMPLETE).is_file():
                return folder
    return None


def _finished(model_dir: str) -> bool:
    return is_finished(model_dir) or Path(model_dir, COMPLETE).is_file()
