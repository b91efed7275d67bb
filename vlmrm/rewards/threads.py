"""The threads of an asynchronous reward."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Threads:
    """At most `count` threads, which take what is submitted in order and end when nothing waits.

    Unlike an executor's they keep no process from ending: after Ctrl-C nobody waits for a judge that does not answer.
    """

    def __init__(self, count: int, name: str):
        self.count, self.name = count, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._working = 0

    def submit(self, compute: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """The future of `compute(*arguments)`."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, compute, arguments))
            if self._working < self.count:
                self._working += 1
                threading.Thread(target=self._work, name=self.name, daemon=True).start()
        return future

    def cancel(self) -> None:
        """Cancels what no thread has begun."""
        with self._lock:
            for future, _, _ in self._waiting:
                future.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                future, compute, arguments = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(compute(*arguments))
            except BaseException as error:
                future.set_exception(error)
