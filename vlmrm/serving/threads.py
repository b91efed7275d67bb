"""The few threads that compute beside the event loop, which each of them holds up by 5 ms at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync

THREADS = 2

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_LIMITER: RunVar[CapacityLimiter] = RunVar("limiter")  # of this event loop


async def in_thread(compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Return what `compute` does, in one of `THREADS`; forty, as anyio has them, would keep the loop from its turn."""
    try:
        limiter = _LIMITER.get()
    except LookupError:
        limiter = CapacityLimiter(THREADS)
        _LIMITER.set(limiter)
    return await run_sync(compute, *arguments, limiter=limiter)
