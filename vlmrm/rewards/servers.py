"""The servers that rewards of this process ask, judges and services alike: what one learns of a server, all know.

A server that is down costs a round seconds, not every call's retries, however many rewards ask it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from vlmrm.errors import RewardError
from vlmrm.http import Overdue, Refused, Unavailable, Unreachable

FAILURES = 8  # failed calls in a row that make a server suspect
PACE = 0.125  # seconds for each of them: a row that lasts as long as all is one too, however few they were
PROBES = 4  # failed ones after which the breaker opens
FIRST_PAUSE = 0.5  # seconds before the first probe, twice as long before each further one: 7.5 s in all
COOL_DOWN = 30.0  # seconds for which an open breaker refuses calls
LONG = 8.0  # seconds of a failed call after which nothing more is waited for
SILENCE = 9.0  # seconds without any answer after which a server of ours is down
PING_AFTER = 2.0  # seconds without an answer after which a server is asked whether it lives

Result = TypeVar("Result")


class NotAsked(RewardError):
    """A call that is not made, because those before it failed."""


class CircuitBreaker:
    """Closed, it lets calls pass. After `FAILURES` failed calls in a row one call at a time probes the server.

    Where few calls are made at once, a row that lasts `FAILURES` times `PACE` seconds is enough. The others wait for
    the probe: one that passes closes the breaker, and so a short fault loses nothing. After `PROBES` failed probes, or
    a call that failed after `LONG` seconds in which none passed, it opens: calls fail at once for `COOL_DOWN` seconds,
    after which one probe decides again. One that opens tells those `of_server`, of what else it serves: what cannot be
    reached is not asked, and for a server that answers errors one call decides.
    """

    def __init__(self, of_server: dict[str, CircuitBreaker] | None = None):
        self.of_server = {} if of_server is None else of_server
        self.failures = self.failed_probes = 0  # in a row
        self.first = self.passed_at = self.opened = float("-inf")
        self.reason: RewardError | None = None
        self.probing = asyncio.Lock()

    @property
    def suspects(self) -> bool:
        """True while calls wait for a probe, or fail."""
        long = self.failures > 1 and monotonic() >= self.first + FAILURES * PACE
        return long or self.failures >= FAILURES or self.opened > float("-inf")

    @property
    def open(self) -> bool:
        return monotonic() < self.opened + COOL_DOWN

    async def call(self, send: Callable[[bool], Awaitable[Result]]) -> Result:
        """Return what `send` returns; it is told whether its call is a probe."""
        self._ask_others()
        if self.suspects:
            async with self.probing:
                if self.suspects:
                    return await self._probe(send)
        return await self._judged(send, False)

    async def _probe(self, send: Callable[[bool], Awaitable[Result]]) -> Result:
        if self.open:
            raise NotAsked(
                f"not asked, since {self.failures} calls in a row failed, the last one because {self.reason}"
            )
        if self.failed_probes < PROBES:
            await asyncio.sleep(FIRST_PAUSE * 2**self.failed_probes)
        return await self._judged(send, True)

    async def _judged(self, send: Callable[[bool], Awaitable[Result]], probe: bool) -> Result:
        started = monotonic()
        try:
            answer = await send(probe)
        except (Unavailable, Overdue) as error:
            if not error.busy:
                self._failed(error, probe, started)
            raise
        except Refused:  # an answer all the same: the server works
            self._passed()
            raise
        self._passed()
        return answer

    def _passed(self) -> None:
        self.failures, self.failed_probes, self.opened = 0, 0, float("-inf")
        self.passed_at = monotonic()

    def _failed(self, error: RewardError, probe: bool, started: float) -> None:
        now = monotonic()
        if not self.failures:
            self.first = now
        self.failed_probes += int(probe and self.failures > 0)  # else another call closed the breaker meanwhile
        self.failures += 1
        self.reason = error
        if self.failed_probes >= PROBES or (now - started >= LONG and self.passed_at < started):
            self.failed_probes, self.opened = PROBES, now

    def _ask_others(self) -> None:
        """Begin where another breaker of the server stands open."""
        if not self.failures and (other := next((each for each in self.of_server.values() if each.open), None)):
            self.failures, self.failed_probes, self.reason = FAILURES + other.failures, PROBES, other.reason
            if isinstance(other.reason, Unreachable):
                self.opened = other.opened


class KnownServer:
    """What this process knows of a server: a breaker for each thing that it serves, and whether it lives.

    For the event loop of `run`.
    """

    def __init__(self, name: str):
        self.name = name
        self.circuits: dict[str, CircuitBreaker] = {}
        self._ping: asyncio.Task[bool] | None = None

    def circuit(self, name: str) -> CircuitBreaker:
        """Return the breaker of what the server serves as `name`: the path of a reward, or a judge's model."""
        return self.circuits.setdefault(name, CircuitBreaker(self.circuits))

    async def watched(
        self, call: Awaitable[Result], ping: Callable[[float], Awaitable[object]], silence: float
    ) -> Result:
        """Return what `call` returns, while the server answers `ping`, whose argument is the seconds that it has."""
        task, wait = asyncio.ensure_future(call), min(PING_AFTER, silence / 2)
        try:
            while not (await asyncio.wait({task}, timeout=wait))[0]:
                if self._ping is None or self._ping.done():  # one for all calls that wait
                    self._ping = asyncio.create_task(_answers(ping(silence - wait)))
                pinging = self._ping
                await asyncio.wait({task, pinging}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and not pinging.result():
                    raise Unreachable(f"{self.name} has answered nothing for {silence:g} s, not even whether it lives")
            return task.result()
        finally:
            task.cancel()


async def _answers(ping: Awaitable[object]) -> bool:
    try:
        await ping
    except RewardError:
        return False
    return True


_origins: dict[tuple[int, str], KnownServer] = {}


def origin_at(address: str) -> KnownServer:
    """Return what this process knows of a server, by scheme, host and port; a fork begins anew."""
    return _origins.setdefault((os.getpid(), address), KnownServer(address))
