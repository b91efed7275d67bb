"""The event loop: the request that it handles, whose turn is next, threads beside it, and work that it repeats."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync

from vlmrm.data.media import image_size
from vlmrm.serving.clients import Client

logger = logging.getLogger("vlmrm")

LANE: ContextVar[str] = ContextVar("lane", default="")  # of the request that is being handled
SMOOTHING = 0.05  # of the seconds of a turn: the weight of the latest
ROUND_S = 0.008  # of a round, for each of which the next one has a further turn
MOST_TURNS = 8
THREADS = 2  # each of which holds the loop up by 5 ms at a time

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


@dataclass
class RequestContext:
    """What every step of a request may ask for."""

    client: Client = field(default_factory=Client)
    deadline: float = math.inf  # of `time.monotonic`, after which its client waits no longer
    is_small: bool = True  # whether its body is read, checked and hashed in a millisecond or two
    body_bytes: int = 0
    wanted: str = ""  # the revision that must compute its scores
    sizes: dict[bytes, tuple[int, int]] = field(default_factory=dict, repr=False)  # width and height of its pictures
    revisions: dict[str, str] = field(default_factory=dict)  # that computed its scores, by reward
    arrived: float = field(default_factory=time.monotonic)


_CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def begin_request(context: RequestContext) -> None:
    _CURRENT.set(context)


def current_request() -> RequestContext:
    """Return the context of the request that is being handled; outside of one, an empty one."""
    return _CURRENT.get() or RequestContext()


class TurnScheduler:
    """Lets one request go on in each round of the event loop: lane after lane, and first come first served in a lane.

    Without it, a hundred bodies that arrive together block `/health` for a tenth of a second. A round that was long is
    followed by one of several turns. A lane is what one client sends to one reward.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiting = 0
        self._turn_s = 0.0  # seconds between two turns while requests wait
        self._last: tuple[float, int] | None = None  # when the last round began, and its turns; None after none waited
        self._since = 0.0  # when a request began to wait while no other did

    async def next_turn(self, *, scored: bool = False) -> None:
        """Wait for a turn; `scored` requests are nearly done, and do not wait behind those that have just come."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._lanes.setdefault(f"{LANE.get()}{' scored' if scored else ''}", deque()).append(turn)
        self._waiting += 1
        if self._waiting == 1:
            self._since = time.perf_counter()
            loop.call_soon(self._run_next)
        await turn

    def wait(self, lane: str) -> float:
        """Return about how many seconds a request of this lane would wait for its turn."""
        before = len(self._lanes.get(lane, ())) + 1
        return self._turn_s * min(before * max(len(self._lanes), 1), self._waiting + 1)

    def standing(self) -> float:
        """Return for how many seconds requests have waited without a pause."""
        return time.perf_counter() - self._since if self._waiting else 0.0

    def _run_next(self) -> None:
        now = time.perf_counter()
        turns = 1
        if self._last is not None:
            began, given = self._last
            self._turn_s += SMOOTHING * ((now - began) / given - self._turn_s)
            turns = min(1 + int((now - began) / ROUND_S), MOST_TURNS)
        given = 0
        while self._waiting and given < turns:
            lane, waiting = self._lanes.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._lanes[lane] = waiting  # behind the others
            self._waiting -= 1
            if not turn.done():  # else its request has been cancelled
                turn.set_result(None)
                given += 1
        self._last = (now, max(given, 1)) if self._waiting else None
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run_next)


@dataclass
class _Threads:
    """Those of an event loop, and a lock for each client that waits for one, so that no client has more than one."""

    limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS))
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)


_THREADS: RunVar[_Threads] = RunVar("threads")


async def in_thread(compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Return what `compute` returns in one of `THREADS` threads; a client has one at a time."""
    try:
        threads = _THREADS.get()
    except LookupError:
        threads = _Threads()
        _THREADS.set(threads)
    lock = threads.locks.setdefault(current_request().client.name, asyncio.Lock())
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


async def repeat(
    what: str, work: Callable[[], Awaitable[object]], pause: float, errors: MutableMapping[str, str]
) -> NoReturn:
    """Do `work`, and again `pause` seconds after its end, until cancelled; `errors` says under `what` why it fails."""
    while True:
        try:
            await work()
            if errors.pop(what, None) is not None:
                logger.info("%s works again", what)
        except Exception as error:
            message = f"{what} fails ({type(error).__name__}) and is tried again: the log of the service says more."
            if errors.get(what) != message:
                logger.exception("%s fails, and is tried again", what)
            errors[what] = message
        await asyncio.sleep(pause)
