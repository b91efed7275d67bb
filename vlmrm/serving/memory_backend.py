"""The queue and the results in the memory of this process, and lost with it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio import move_on_after
from cachetools import TLRUCache

from vlmrm.conversation import Outcome
from vlmrm.serving.backend import (
    CANCELLED,
    EXPIRED,
    GIVEN_UP,
    MAX_ATTEMPTS,
    Job,
    Overloaded,
    State,
    Status,
    has_errors,
)
from vlmrm.serving.settings import Limits


@dataclass
class _Entry:
    job: Job
    status: Status
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 1  # requests that share it, and neither have its result nor have left


class MemoryBackend:
    """A `Backend` of one process. Above `max_results` results or records, the oldest is dropped before its time."""

    persistent = False

    def __init__(self, limits: Limits):
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[str, str] = {}
        self._queues: dict[str, list[tuple[int, float, int, str]]] = defaultdict(list)
        self._counter = itertools.count()
        self._queued: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._items = self._bytes = 0
        self._finished: OrderedDict[str, float] = OrderedDict()  # job id to when it finished, the oldest first
        self._paces: deque[tuple[float, int]] = deque(maxlen=100)  # when, items done
        self._announcements: dict[str, dict[str, Any]] = {}
        self._records: TLRUCache[str, tuple[float, dict[str, Any]]] = TLRUCache(  # ttl, record
            limits.max_results, ttu=lambda _, record, now: now + record[0], timer=lambda: time.monotonic()
        )

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def put(self, job: Job) -> str:
        self._drop_old()
        equal = self._by_key.get(job.key)
        if equal is not None and _is_shared(self._entries[equal].status, job):
            self._entries[equal].waiters += 1
            shared = self._entries[equal].job
            if shared.deadline is not None:
                shared.deadline = None if job.deadline is None else max(job.deadline, shared.deadline)
            if equal in self._finished:  # kept for another `result_ttl`
                self._finished[equal] = time.monotonic()
                self._finished.move_to_end(equal)
            return equal
        items, size = self._items + len(job.items), self._bytes + job.size
        if items > self._limits.queue_items or size > self._limits.queue_bytes:
            raise Overloaded.of(self._items, self._bytes, self._pace())
        job.packed = b""  # only a queue outside this process needs it
        self._entries[job.id] = _Entry(job, Status(State.queued))
        self._by_key[job.key] = job.id
        self._queue(job)
        return job.id

    async def take(self, reward: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        while True:
            if jobs := self._pop(reward, budget):
                return jobs
            # Nothing is awaited since `_pop`, so no job can have come unseen.
            self._queued[reward].clear()
            await self._queued[reward].wait()

    def _pop(self, reward: str, budget: int) -> list[Job]:
        taken: list[Job] = []
        queue = self._queues[reward]
        while queue:
            entry = self._entries.get(queue[0][3])
            if entry is None or entry.status.state is not State.queued:
                heapq.heappop(queue)  # cancelled meanwhile
                continue
            job = entry.job
            # A job that was attempted comes alone, so that it can harm no other.
            if taken and (sum(candidate.cost for candidate in [*taken, job]) > budget or job.attempts):
                break
            heapq.heappop(queue)
            self._count(job, -1)
            if job.deadline is not None and job.deadline < time.time():
                self._finish(job, Status(State.failed, error=EXPIRED))
                continue
            entry.status = Status(State.running)
            taken.append(job)
            if job.attempts:
                break
        return taken

    async def finish(self, job: Job, outcomes: Sequence[Outcome], seconds: float, revision: str) -> None:
        self._paces.append((time.monotonic(), len(job.items)))
        self._finish(job, Status(State.done, outcomes=list(outcomes), seconds=seconds, revision=revision))

    async def fail(self, job: Job, error: str) -> None:
        self._finish(job, Status(State.failed, error=error))

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        for job in jobs:
            job.attempts += blame is not None
            if job.attempts >= MAX_ATTEMPTS:
                await self.fail(job, f"{blame}, {GIVEN_UP}")
            else:
                self._entries[job.id].status = Status(State.queued)
                self._queue(job)

    async def status(self, job_id: str) -> Status | None:
        self._drop_old()
        entry = self._entries.get(job_id)
        return None if entry is None else entry.status

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        entry = self._entries.get(job_id)
        if entry is None:
            return None
        with move_on_after(timeout):
            await entry.finished.wait()
        if entry.status.finished:
            entry.waiters = max(entry.waiters - 1, 0)
        return entry.status

    async def cancel(self, job_id: str) -> bool:
        entry = self._entries.get(job_id)
        if entry is None or entry.status.finished:
            return False
        entry.waiters = max(entry.waiters - 1, 0)
        if entry.waiters or entry.status.state is not State.queued:
            return False  # another request waits for it, or it runs
        self._count(entry.job, -1)
        self._finish(entry.job, Status(State.cancelled, error=CANCELLED))
        return True

    async def count_unfetched(self) -> int:
        self._drop_old()
        return sum(entry.waiters > 0 for entry in self._entries.values())

    async def depth(self, reward: str) -> tuple[int, int]:
        # By the queue, not the many results that are kept; a job that was queued again may be in it twice.
        names = {name for *_, name in self._queues[reward]}
        entries = [self._entries[name] for name in names if name in self._entries]
        sizes = [entry.job.size for entry in entries if entry.status.state is State.queued]
        return len(sizes), sum(sizes)

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        self._records[name] = ttl, record

    async def load_record(self, name: str) -> dict[str, Any] | None:
        return self._records.get(name, (0.0, None))[1]

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        self._announcements[process] = health

    async def announcements(self) -> dict[str, dict[str, Any]]:
        return self._announcements

    def _queue(self, job: Job) -> None:
        self._count(job, 1)
        heapq.heappush(self._queues[job.reward], (-job.priority, job.created, next(self._counter), job.id))
        self._queued[job.reward].set()

    def _count(self, job: Job, sign: int) -> None:
        self._items += sign * len(job.items)
        self._bytes += sign * job.size

    def _finish(self, job: Job, status: Status) -> None:
        entry = self._entries[job.id]
        entry.status = status
        entry.job.items = []  # only the result is kept
        entry.finished.set()
        self._finished[job.id] = time.monotonic()

    def _drop_old(self) -> None:
        """Drop what finished more than `result_ttl` ago, and the oldest above `max_results`."""
        bound = time.monotonic() - self._limits.result_ttl
        while self._finished:
            oldest = next(iter(self._finished))
            if self._finished[oldest] >= bound and len(self._finished) <= self._limits.max_results:
                break
            del self._finished[oldest]
            entry = self._entries.pop(oldest)
            if self._by_key.get(entry.job.key) == entry.job.id:
                del self._by_key[entry.job.key]

    def _pace(self) -> float:
        """Return the items a second of the last jobs; 0 where there are none."""
        if len(self._paces) < 2:
            return 0.0
        return sum(items for _, items in self._paces) / max(self._paces[-1][0] - self._paces[0][0], 1e-3)


def _is_shared(status: Status, job: Job) -> bool:
    """Return whether `job` can have the result of an equal job with that status."""
    if not status.finished:
        return True
    return status.revision in job.revisions and not has_errors(status.outcomes or ())
