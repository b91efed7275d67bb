"""Turns of the event loop: which request goes on next, and how long the last in line would wait."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from contextvars import ContextVar

LANE: ContextVar[str] = ContextVar("lane", default="")  # of the request that is being handled
SMOOTHING = 0.05  # of the seconds of a turn: the weight of the latest
ROUND_S = 0.008  # of a round, for each of which the next one has a further turn
MOST_TURNS = 8


class TurnScheduler:
    """Lets one request go on in each round of the event loop: lane after lane, and first come first served in a lane.

    Without it, a hundred bodies or results that arrive together block `/health` for a tenth of a second. A round that
    was long, because many new requests had to be refused in it, is followed by one of several turns: refusing may not
    keep the service from answering. A lane is
    what one client sends to one reward, so that a flood of one does not hold up the others.
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
            given += self._give()
        self._last = (now, max(given, 1)) if self._waiting else None
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run_next)

    def _give(self) -> int:
        """Give the next lane's first request its turn; return 0 where that request has been cancelled."""
        lane, turns = self._lanes.popitem(last=False)
        turn = turns.popleft()
        if turns:
            self._lanes[lane] = turns  # behind the others
        self._waiting -= 1
        if turn.done():
            return 0
        turn.set_result(None)
        return 1
