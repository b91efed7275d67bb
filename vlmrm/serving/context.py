"""Describe the request that is being handled by its headers: the client, the time it waits, its demands."""

from __future__ import annotations

import math
import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class RequestContext:
    """What every step of a request may ask for.

    Args:
        client: whose fair share it counts against.
        arrived: of `time.monotonic`.
        deadline: of `time.monotonic`, after which its client waits no longer.
        is_small: whether its body is read, checked and hashed in a millisecond or two, which a thread would take too.
        sizes: width and height of its pictures whose headers have been read.
        wanted: the revision that must compute its scores; "" for any.
        revisions: those that did, by reward, for a header of the answer.
    """

    client: str = ""
    deadline: float = math.inf
    is_small: bool = True
    body_bytes: int = 0
    wanted: str = ""
    sizes: dict[bytes, tuple[int, int]] = field(default_factory=dict, repr=False)
    revisions: dict[str, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)


_CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def begin_request(context: RequestContext) -> None:
    """Make `context` that of the request which this task handles."""
    _CURRENT.set(context)


def current_request() -> RequestContext:
    """Return the context of the request that is being handled; outside of one, an empty one."""
    return _CURRENT.get() or RequestContext()
