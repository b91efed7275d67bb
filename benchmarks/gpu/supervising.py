"""A command with an end, whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

PATIENCE = 15.0  # seconds to end in after SIGTERM


def supervise(words: Sequence[str], seconds: float) -> int | None:
    """Run a command and stop it after `seconds`, with all that it started; return its exit status, None if stopped."""
    process = subprocess.Popen(words, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a command's whole process group: servers that it left, too."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(PATIENCE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
