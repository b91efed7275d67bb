"""The event loop that all judges of a process share, in a thread of its own.

A connection or a semaphore belongs to the loop that it was first used in. With one loop that never ends, a judge can
be called from any thread, any number of times, and also from a thread whose own loop is running.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from vlmrm.errors import RewardError

Result = TypeVar("Result")

_starting = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process, since a fork copies this but no threads


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What `coroutine` returns or raises on the judges' loop; waits for it, and cancels it when interrupted.

    Raises:
        RewardError: in a process that was forked from one whose judges were in use.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    except RewardError:
        coroutine.close()
        raise
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:
        if os.getpid() not in _loops:
            if _loops:
                raise RewardError(
                    "this process was forked from one whose judges were in use, and has none of their connections: "
                    "start it by `spawn`, or fork before the first reward."
                )
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="judges", daemon=True).start()
        return _loops[os.getpid()]
