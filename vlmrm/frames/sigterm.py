"""SIGTERM as an ordinary end of the program, at which what was collected so far is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from vlmrm.errors import Preempted


class Sigterm:
    """Lets SIGTERM end the program in the ordinary way, so that it flushes, though not within a write.

    Where the program, or a library, handles the signal itself, nothing is changed.
    """

    def __init__(self) -> None:
        self._held = 0
        self._came = False

    def install(self) -> None:
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end)

    @contextmanager
    def held_back(self) -> Generator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._came and not self._held:
                self._came = False
                raise SystemExit(Preempted.exit_code)

    def _end(self, *_: Any) -> None:
        if self._held:
            self._came = True
        else:
            raise SystemExit(Preempted.exit_code)


sigterm = Sigterm()
