"""A circuit breaker: when a server answers nobody, the next items need not find out one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlmrm.errors import RewardError


class Circuit:
    """Closed, items pass. After `failures` failed items in a row it is open, and items fail at once.

    When `cool_down` seconds are over, one item goes as a probe, and others wait for what becomes of it: they all
    pass, or it is open for as long again. Used on the judges' loop alone.
    """

    def __init__(self, failures: int, cool_down: float, clock: Callable[[], float]):
        self.failures = failures
        self.cool_down = cool_down
        self.clock = clock
        self.in_a_row = 0
        self.opened: float | None = None
        self.reason = ""
        self.probe: asyncio.Event | None = None

    async def enter(self) -> bool:
        """Lets an item pass; whether it is the probe. Each that passes ends in `passed`, `failed` or `abandoned`.

        Raises:
            RewardError: while the circuit is open, with the reason of the item that opened it.
        """
        while self.opened is not None:
            if self.clock() < self.opened + self.cool_down:
                raise RewardError(
                    f"not asked, since {self.in_a_row} items in a row failed, the last one because {self.reason}"
                )
            if self.probe is None:
                self.probe = asyncio.Event()
                return True
            await self.probe.wait()
        return False

    def passed(self) -> None:
        self.in_a_row, self.opened = 0, None
        self.abandoned()

    def failed(self, reason: str) -> None:
        self.in_a_row += 1
        if self.in_a_row >= self.failures:
            self.opened, self.reason = self.clock(), reason
        self.abandoned()

    def abandoned(self) -> None:
        """The item ended without telling anything of the server; if it was the probe, another is sent."""
        if self.probe is not None:
            self.probe.set()
            self.probe = None
