"""The queue and the results in the memory of this process, and lost with it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from vlmrm.serving.fair_queue import FairQueue
from vlmrm.serving.settings import Limits


@dataclass
class _Entry:
    job: Job
    status: Status
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 1  # requests that share it, and neither have its result nor have left


class MemoryBackend:
    """A `Backend` of one process. Above `max_results` results or records, the oldest is dropped before its time.

    Args:
        rewards: the items and bytes that may wait for each; for others, what `limits` allows in all.
    """

    persistent = False

    def __init__(self, limits: Limits, rewards: Mapping[str, tuple[int, int]] | None = None):
        self._limits = limits
        self.errors: dict[str, str] = {}
        self._capacity = rewards or {}
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[str, str] = {}
        self._queues: dict[str, FairQueue] = defaultdict(FairQueue)
        # By reward, the workers that wait for a job, and the prefixes that they have.
        self._idle: dict[str, dict[asyncio.Future[None], Collection[str]]] = defaultdict(dict)
        self._finished: OrderedDict[str, float] = OrderedDict()  # job id to when it finished, the oldest first
        # By reward, when items were done and how many.
        self._paces: dict[str, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=100))
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
        self._check_room(job)
        job.packed = b""  # only a queue outside this process needs it
        self._entries[job.id] = _Entry(job, Status(State.queued))
        self._by_key[job.key] = job.id
        self._queue(job)
        return job.id

    async def take(self, reward: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        while True:
            batch = self._queues[reward].take(budget, cached)
            for job in batch.late:
                self._finish(job, Status(State.failed, error=EXPIRED))
            for job in batch.jobs:
                self._entries[job.id].status = Status(State.running)
            if batch.jobs:
                return batch.jobs
            # Nothing is awaited since `take`, so no job can have come unseen.
            idle = self._idle[reward]
            woken = asyncio.get_running_loop().create_future()
            idle[woken] = cached
            try:
                await woken
            except asyncio.CancelledError:
                _wake(idle)  # what this worker was woken for
                raise
            finally:
                del idle[woken]

    async def finish(self, job: Job, outcomes: Sequence[Outcome], seconds: float, revision: str) -> None:
        self._paces[job.reward].append((time.monotonic(), len(job.items)))
        self._finish(job, Status(State.done, outcomes=list(outcomes), seconds=seconds, revision=revision))

    async def fail(self, job: Job, error: str) -> None:
        self._finish(job, Status(State.failed, error=error))

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        for job in jobs:
            entry = self._entries.get(job.id)
            if entry is None or entry.status.finished:
                continue
            job.attempts += blame is not None
            if not entry.waiters:  # it was cancelled while it ran
                self._finish(job, Status(State.cancelled, error=CANCELLED))
            elif job.attempts >= MAX_ATTEMPTS:
                await self.fail(job, f"{blame}, {GIVEN_UP}")
            else:
                entry.status = Status(State.queued)
                self._queue(job, returned=True)

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
        self._queues[entry.job.reward].remove(entry.job)
        self._finish(entry.job, Status(State.cancelled, error=CANCELLED))
        return True

    async def unfetched(self) -> Mapping[str, int]:
        self._drop_old()
        return Counter(entry.job.reward for entry in self._entries.values() if entry.waiters)

    async def depth(self, reward: str) -> tuple[int, int]:
        queue = self._queues[reward]
        return len(queue), queue.bytes

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        self._records[name] = ttl, record

    async def load_record(self, name: str) -> dict[str, Any] | None:
        return self._records.get(name, (0.0, None))[1]

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        self._announcements[process] = health

    async def announcements(self) -> dict[str, dict[str, Any]]:
        return self._announcements

    def _check_room(self, job: Job) -> None:
        queue = self._queues[job.reward]
        whole = (self._limits.queue_items, self._limits.queue_bytes)
        max_items, max_bytes = self._capacity.get(job.reward, whole)
        total = sum(queue.bytes for queue in self._queues.values())
        items, size = queue.items + len(job.items), queue.bytes + job.size
        if items > max_items or size > max_bytes or total + job.size > self._limits.queue_bytes:
            raise Overloaded.of(job.reward, queue.items, queue.bytes, total, self._pace(job.reward))

    def _queue(self, job: Job, *, returned: bool = False) -> None:
        self._queues[job.reward].push(job, returned=returned)
        idle = self._idle[job.reward]
        has_it = [woken for woken, cached in idle.items() if not job.prefixes.keys().isdisjoint(cached)]
        _wake(has_it[:1] if has_it and not has_it[0].done() else idle)

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

    def _pace(self, reward: str) -> float:
        """Return the items a second of the last jobs of a reward; 0 where there are none."""
        paces = self._paces[reward]
        if len(paces) < 2:
            return 0.0
        return sum(items for _, items in paces) / max(paces[-1][0] - paces[0][0], 1e-3)


def _wake(idle: Iterable[asyncio.Future[None]]) -> None:
    for woken in idle:
        if not woken.done():
            woken.set_result(None)


def _is_shared(status: Status, job: Job) -> bool:
    """Return whether `job` can have the result of an equal job with that status."""
    if not status.finished:
        return True
    return status.revision in job.revisions and not has_errors(status.outcomes or ())
