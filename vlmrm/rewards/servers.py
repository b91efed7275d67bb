"""The servers that rewards of this process ask, judges and services alike: what one learns of a server, all know.

A server that is down costs a round seconds, not every call's retries, however many rewards ask it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from vlmrm.errors import RewardError
from vlmrm.http import Overdue, Refused, Unavailable, Unreachable

FAILURES = 8  # failed calls in a row that make a server suspect
PACE = 0.125  # seconds for each of them: a row that lasts as long as all is one too, however few they were
PROBES = 4  # failed ones after which the breaker opens
FIRST_PAUSE = 0.5  # seconds before the first probe, twice as long before each further one: 7.5 s in all
COOL_DOWN = 30.0  # seconds for which an open breaker refuses calls
LONG = 8.0  # seconds of a failed call after which nothing more is waited for
PING_AFTER = 2.0  # seconds without an answer after which a server is asked whether it lives

Result = TypeVar("Result")


class NotAsked(RewardError):
    """A call that is not made, because those before it failed."""


class CircuitBreaker:
    """Closed, it lets calls pass. After `FAILURES` failed calls in a row one call at a time probes the server.

    Where few calls are made at once, a row that lasts `FAILURES` times `PACE` seconds is enough. The others wait for
    the probe: one that passes closes the breaker, and so a short fault loses nothing. After `PROBES` failed probes, or
    a call that failed after `LONG` seconds in which none passed, it opens: calls fail at once for `COOL_DOWN` seconds,
    after which one probe decides again.

    Where a server has several of them, one that opens tells the others: what cannot be reached is not asked, and for a
    server that answers errors one call decides. Used on the event loop of `run` only.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, of_server: dict[str, CircuitBreaker] | None = None
    ):
        self.clock = clock
        self.of_server = {} if of_server is None else of_server
        self.in_a_row = 0
        self.first = 0.0  # the time of the first of them
        self.last = 0.0
        self.passed_at = float("-inf")
        self.failed_probes = 0
        self.opened: float | None = None
        self.unreachable = False
        self.reason = ""
        self.probe: asyncio.Event | None = None

    async def call(
        self, send: Callable[[bool], Awaitable[Result]], sleep: Callable[[float], Awaitable[object]]
    ) -> Result:
        """Return what `send` returns, which is told whether its call is a probe.

        Raises:
            NotAsked: while the breaker is open, with the reason of the last failure.
        """
        probe = await self._enter()
        started = self.clock()
        try:
            if probe:
                pause = 0.0 if self.opened is not None else FIRST_PAUSE * 2**self.failed_probes
                await sleep(pause)
                started = self.clock()
            answer = await send(probe)
        except (Unavailable, Overdue) as error:
            if not getattr(error, "busy", False):
                self._failed(error, probe, started)
            raise
        except Refused:
            self._passed()  # an answer all the same: the server works
            raise
        finally:
            if probe:  # one without a verdict leaves its place to the next
                self._release()
        self._passed()
        return answer

    async def _enter(self) -> bool:
        """Let a call pass; return whether it is a probe."""
        self._ask_others()
        while self.suspects:
            if self.opened is not None and self.clock() < self.opened + COOL_DOWN:
                raise NotAsked(
                    f"not asked, since {self.in_a_row} calls in a row failed, the last one because {self.reason}"
                )
            if self.probe is None:
                self.probe = asyncio.Event()
                return True
            await self.probe.wait()
        return False

    def _ask_others(self) -> None:
        """Begin where another breaker of the server stands open."""
        if self.in_a_row:
            return
        for other in self.of_server.values():
            if other.opened is None or self.clock() >= other.opened + COOL_DOWN:
                continue
            self.in_a_row, self.first, self.last, self.reason = FAILURES, other.first, other.last, other.reason
            self.failed_probes = PROBES
            self.opened = other.opened if other.unreachable else self.clock() - COOL_DOWN  # one call decides
            self.unreachable = other.unreachable
            return

    @property
    def suspects(self) -> bool:
        """True while calls wait for a probe, or fail."""
        return self.opened is not None or self.in_a_row >= FAILURES or (self.in_a_row > 1 and self.patience == 0.0)

    @property
    def patience(self) -> float:
        """Return the seconds for which calls may still fail in a row, if they have begun to."""
        return max(0.0, self.first + FAILURES * PACE - self.clock())

    def _passed(self) -> None:
        self.in_a_row, self.failed_probes, self.opened = 0, 0, None
        self.passed_at = self.clock()
        self._release()

    def _failed(self, error: RewardError, probe: bool, started: float) -> None:
        suspected, self.last = self.suspects, self.clock()
        if not self.in_a_row:
            self.first = self.last
        self.in_a_row += 1
        self.reason = str(error)
        self.failed_probes += int(probe and suspected)  # else another call closed the breaker meanwhile
        alone = self.last - started >= LONG and self.passed_at < started
        if self.failed_probes >= PROBES or alone:
            self.failed_probes, self.opened = PROBES, self.last
            self.unreachable = isinstance(error, Unreachable)

    def _release(self) -> None:
        if self.probe is not None:
            self.probe.set()
            self.probe = None


class Server:
    """One address with what this process knows of it: a breaker for each thing that it serves, and its last answer."""

    def __init__(self) -> None:
        self.circuits: dict[str, CircuitBreaker] = {}
        self.answered = float("-inf")  # by the loop's clock
        self._ping: asyncio.Task[None] | None = None

    def circuit(self, name: str, clock: Callable[[], float] = time.monotonic) -> CircuitBreaker:
        """Return the breaker of what the server serves as `name`: the path of a reward, or a judge's model."""
        with _lock:
            return self.circuits.setdefault(name, CircuitBreaker(clock, self.circuits))

    async def watched(self, call: Awaitable[Result], ping: Callable[[], Awaitable[object]], silence: float) -> Result:
        """Return what `call` returns, while the server answers anything, be it only `ping`.

        Raises:
            Unreachable: after `silence` seconds without an answer to any call or ping.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(call)
        started = loop.time()
        try:
            while not task.done():
                quiet = loop.time() - max(started, self.answered)
                if quiet >= silence:
                    raise Unreachable(f"it has answered nothing for {silence:g} s, not even whether it lives")
                if quiet >= PING_AFTER and self._ping is None:
                    self._ping = asyncio.create_task(self._asked(ping))
                await asyncio.wait(
                    {task}, timeout=(silence if quiet >= PING_AFTER else min(PING_AFTER, silence)) - quiet
                )
            answer = task.result()
        finally:
            task.cancel()
        self.answered = loop.time()
        return answer

    async def _asked(self, ping: Callable[[], Awaitable[object]]) -> None:
        try:
            await ping()
            self.answered = asyncio.get_running_loop().time()
        except RewardError:
            pass  # the call that waits says so
        finally:
            self._ping = None


_lock = threading.Lock()
_servers: dict[str, Server] = {}
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process id: a fork copies this, but no threads


def server_at(origin: str) -> Server:
    """Return what this process knows of a server, by scheme, host and port."""
    with _lock:
        return _servers.setdefault(origin, Server())


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return what `coroutine` returns on the event loop of servers; cancel it when this thread is interrupted.

    A connection or a semaphore belongs to the loop of its first use. All rewards of a process share one loop that
    never ends, in a thread, so that they can be called from any thread, also from one with a running loop.

    Raises:
        RewardError: in a process that was forked from one whose rewards were in use.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, current_loop())
    except RewardError:
        coroutine.close()
        raise
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def current_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, started on first use; raises RewardError as `run` does."""
    with _lock:
        if os.getpid() not in _loops:
            if _loops:
                raise RewardError(
                    "this process was forked from one whose judges or reward servers were in use, and has none of "
                    "their connections: start it by `spawn`, or fork before the first reward."
                )
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="reward-servers", daemon=True).start()
        return _loops[os.getpid()]
