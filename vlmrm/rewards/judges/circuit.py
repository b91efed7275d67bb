"""A circuit breaker over the calls of one server: a server that is down costs a round seconds, not all its retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlmrm.errors import RewardError

PROBES = 4  # failed ones after which the breaker opens
FIRST_PAUSE = 0.5  # seconds before the first probe, twice as long before each further one: 7.5 s in all


class CircuitBreaker:
    """Closed, it lets calls pass. After `failures` failed calls in a row one call at a time probes the server.

    The others wait for it: one that passes closes the breaker, and so a short fault loses nothing. After `PROBES`
    failed probes it opens: calls fail at once for `cool_down` seconds, after which one probe decides again. Used on
    the judges' event loop only.
    """

    def __init__(self, failures: int, cool_down: float, clock: Callable[[], float]):
        self.failures = failures
        self.cool_down = cool_down
        self.clock = clock
        self.in_a_row = 0
        self.failed_probes = 0
        self.opened: float | None = None
        self.reason = ""
        self.probe: asyncio.Event | None = None

    async def enter(self) -> bool:
        """Let a call pass; return whether it is a probe. Each ends in `passed`, `failed` or `abandoned`.

        Raises:
            RewardError: while the breaker is open, with the reason of the last failure.
        """
        while self.in_a_row >= self.failures:
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
    def pause(self) -> float:
        """Return the seconds that a probe waits before its call."""
        return 0.0 if self.opened is not None else FIRST_PAUSE * 2**self.failed_probes

    def passed(self) -> None:
        """End a call that the server answered: the breaker closes."""
        self.in_a_row, self.failed_probes, self.opened = 0, 0, None
        self._release()

    def failed(self, reason: str, probe: bool) -> None:
        """End a call that failed for `reason`."""
        self.in_a_row += 1
        self.reason = reason
        if probe and self.in_a_row > self.failures:  # else another call closed the breaker meanwhile
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
