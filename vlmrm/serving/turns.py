"""Turns of the event loop: which request goes on next, and how long the last in line would wait."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from contextvars import ContextVar

LANE: ContextVar[str] = ContextVar("lane", default="")  # of the request that is being handled
SMOOTHING = 0.05  # of the seconds of a turn: the weight of the latest


class TurnScheduler:
    """Lets one request go on in each round of the event loop: lane after lane, and first come first served in a lane.

    Without it, a hundred bodies or results that arrive together block `/health` for a tenth of a second. A lane is
    what one client sends to one reward, so that a flood of one does not hold up the others.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiting = 0
        self._turn_s = 0.0  # seconds between two turns while requests wait
        self._last: float | None = None  # when the last turn began; None after the line was empty

    async def next_turn(self) -> None:
        """Wait for a round of the event loop that no other request uses."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._lanes.setdefault(LANE.get(), deque()).append(turn)
        self._waiting += 1
        if self._waiting == 1:
            loop.call_soon(self._run_next)
        await turn

    def wait(self, lane: str) -> float:
        """Return about how many seconds a request of this lane would wait for its turn."""
        before = len(self._lanes.get(lane, ())) + 1
        return self._turn_s * min(before * max(len(self._lanes), 1), self._waiting + 1)

    def _run_next(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._turn_s += SMOOTHING * (now - self._last - self._turn_s)
        lane, turns = self._lanes.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._lanes[lane] = turns  # behind the others
        self._waiting -= 1
        if not turn.done():  # its request may have been cancelled
            turn.set_result(None)
        self._last = now if self._waiting else None
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run_next)
