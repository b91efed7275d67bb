"""Compute in a few threads beside the event loop: each may hold it up by 5 ms at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync

from vlmrm.data.media import image_size
from vlmrm.serving.context import current_request

THREADS = 2

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


@dataclass
class _Threads:
    """Those of an event loop, and a lock for each client that waits for one, so that no client has more than one."""

    limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS))
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)


_THREADS: RunVar[_Threads] = RunVar("threads")


async def in_thread(compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Return what `compute` returns in one of `THREADS` threads; a client has one at a time.

    anyio's own forty would keep the event loop from its turn.
    """
    try:
        threads = _THREADS.get()
    except LookupError:
        threads = _Threads()
        _THREADS.set(threads)
    lock = threads.locks.setdefault(current_request().client, asyncio.Lock())
    async with lock:
        return await run_sync(compute, *arguments, limiter=threads.limiter)


class _NotOnTheLoop(Exception):
    """A header is to be read: that may take half a second."""


async def computed(compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Return what `compute` returns: at once of a small request, in a thread of a larger one or one with pictures."""
    if current_request().is_small:
        with suppress(_NotOnTheLoop):
            return compute(*arguments)
    return await in_thread(compute, *arguments)


def picture_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a picture, read once in a request; for `computed` or a thread."""
    sizes = current_request().sizes
    if data not in sizes:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise _NotOnTheLoop
        sizes[data] = image_size(data)
    return sizes[data]
