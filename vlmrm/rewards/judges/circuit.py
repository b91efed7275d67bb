"""A circuit breaker over the calls of one server: a server that is down costs a round seconds, not all its retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlmrm.errors import RewardError

PACE = 0.125  # seconds for each of the `failures`: a row that lasts as long is one too, however few they were
PROBES = 4  # failed ones after which the breaker opens
FIRST_PAUSE = 0.5  # seconds before the first probe, twice as long before each further one: 7.5 s in all


class CircuitBreaker:
    """Closed, it lets calls pass. After `failures` failed calls in a row one call at a time probes the server.

    Where few calls are made at once, a row that lasts `failures` times `PACE` seconds is enough. The others wait for
    the probe: one that passes closes the breaker, and so a short fault loses nothing. After `PROBES` failed probes it
    opens: calls fail at once for `cool_down` seconds, after which one probe decides again. Used on the judges' event
    loop only.
    """

    def __init__(self, failures: int, cool_down: float, clock: Callable[[], float]):
        self.failures = failures
        self.cool_down = cool_down
        self.clock = clock
        self.in_a_row = 0
        self.first = 0.0  # the time of the first of them
        self.failed_probes = 0
        self.opened: float | None = None
        self.reason = ""
        self.probe: asyncio.Event | None = None

    async def enter(self) -> bool:
        """Let a call pass; return whether it is a probe. Each ends in `passed`, `failed` or `abandoned`.

        Raises:
            RewardError: while the breaker is open, with the reason of the last failure.
        """
        while self.suspects:
            if self.opened is not None and self.clock() < self.opened + self.cool_down:
                raise RewardError(
                    f"not asked, since {self.in_a_row} calls in a row failed, the last one because {self.reason}"
                )
            if self.probe is None:
                self.probe = asyncio.Event()
                return True
            await self.probe.wait()
        return False

    @property
    def suspects(self) -> bool:
        """True while calls wait for a probe, or fail."""
        return self.in_a_row >= self.failures or (self.in_a_row > 1 and self.patience == 0.0)

    @property
    def patience(self) -> float:
        """Return the seconds for which calls may still fail in a row, if they have begun to."""
        return max(0.0, self.first + self.failures * PACE - self.clock())

    @property
    def pause(self) -> float:
        """Return the seconds that a probe waits before its call."""
        return 0.0 if self.opened is not None else FIRST_PAUSE * 2**self.failed_probes

    def passed(self) -> None:
        """End a call that the server answered: the breaker closes."""
        self.in_a_row, self.failed_probes, self.opened = 0, 0, None
        self._release()

    def failed(self, reason: str, probe: bool) -> None:
        """End a call that failed for `reason`."""
        suspected = self.suspects
        if not self.in_a_row:
            self.first = self.clock()
        self.in_a_row += 1
        self.reason = reason
        if probe and suspected:  # else another call closed the breaker meanwhile
            self.failed_probes += 1
            if self.failed_probes >= PROBES:
                self.opened = self.clock()
        self.abandoned(probe)

    def abandoned(self, probe: bool) -> None:
        """End a call without a verdict on the server; if it was the probe, the next call is one."""
        if probe:
            self._release()

    def _release(self) -> None:
        if self.probe is not None:
            self.probe.set()
            self.probe = None
