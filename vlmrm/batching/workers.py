"""Errors of DataLoader workers, as they were raised: torch hands on their type, with a whole traceback as message."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from vlmrm.errors import VlmrmError

IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")


@contextmanager
def plain_worker_errors() -> Generator[None]:
    """Around a loop over a DataLoader: its workers' errors become one sentence again, and so does their death."""
    try:
        yield
    except VlmrmError as error:
        message = str(error)
        if not IN_WORKER.match(message):
            raise
        # The last line of the worker's traceback is `module.Class: the sentence`.
        raise type(error)(message.strip().splitlines()[-1].partition(": ")[2]) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise VlmrmError(
            "a DataLoader worker was killed, most likely for want of memory: lower dataloader_num_workers or "
            "max_pixels, and resume from the last checkpoint where there is one."
        ) from error
