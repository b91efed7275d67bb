"""Turns: of all requests that could go on at once, one does in each round of the event loop.

Without them, a hundred bodies or results that come together are a tenth of a second in which `/health` has no answer.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """A line of those that have come to where their work is; they go on in the order in which they came."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Waits for a round of the event loop in which nobody else goes on."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._line.append(turn)
        if len(self._line) == 1:
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        turn = self._line.popleft()
        if not turn.done():  # whoever waited for it may have gone
            turn.set_result(None)
        if self._line:
            asyncio.get_running_loop().call_soon(self._give)
