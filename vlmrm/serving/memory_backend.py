"""The queue and the results in the memory of this process, and lost with it: in fair shares of clients."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio import move_on_after
from cachetools import TLRUCache

from vlmrm.conversation import Outcome
from vlmrm.serving import backend
from vlmrm.serving.backend import Job, Overloaded, State, Status, has_errors, queues
from vlmrm.serving.settings import Limits

FORGOTTEN = 1000  # clients without a job whose shares are remembered, above which only those ahead are


@dataclass
class _Class:
    """The jobs of one priority, shared by clients by start-time fair queueing (Goyal et al. 1996)."""

    since: float  # when it last had a job taken, or its first one came
    clock: float = 0.0  # the virtual time, or tag, of the client that was served last, from which a new one starts
    lines: dict[str, dict[str, Job]] = field(default_factory=dict)  # by client, the oldest job first
    tags: dict[str, float] = field(default_factory=dict)


@dataclass
class JobBatch:
    """The jobs that one `take` returns; `late` are those past their deadline."""

    room: int  # tokens
    jobs: list[Job] = field(default_factory=list)
    late: list[Job] = field(default_factory=list)
    _prefixes: set[str] = field(default_factory=set)

    def has_room(self, job: Job) -> bool:
        return not self.jobs or (not job.attempts and self._tokens(job) <= self.room)

    def add(self, job: Job) -> int:
        """Add a job, and return the tokens that it adds to the batch."""
        if job.deadline is not None and job.deadline < time.monotonic():
            self.late.append(job)
            return 0
        tokens = self._tokens(job)
        self.jobs.append(job)
        self._prefixes.update(job.prefixes)
        self.room -= tokens
        return tokens

    def _tokens(self, job: Job) -> int:
        return job.cost - sum(job.prefixes[prefix] for prefix in self._prefixes & job.prefixes.keys())


def tokens_of(jobs: Sequence[Job]) -> int:
    """Estimate the tokens of a batch of these jobs; a prefix that they share counts once."""
    batch = JobBatch(0)
    return sum(map(batch.add, jobs))


class FairQueue:
    """The jobs that wait in one queue; `Backend.take` defines their order."""

    def __init__(self) -> None:
        self.items = self.bytes = 0
        self._jobs: dict[str, Job] = {}
        self._returned: dict[str, Job] = {}
        self._classes: dict[int, _Class] = {}
        self._mates: dict[tuple[int, str], dict[str, Job]] = {}  # by priority and prefix
        self._aged = 0.0  # when a lower priority last began a batch

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, job: Job, *, returned: bool = False) -> None:
        """Add a job; one that was `returned` comes before all others."""
        self._jobs[job.id] = job
        self._count(job, 1)
        if returned:
            self._returned[job.id] = job
            return
        group = self._classes.setdefault(job.priority, _Class(time.monotonic()))
        if job.client not in group.lines:
            if len(group.tags) > 2 * len(group.lines) + FORGOTTEN:
                group.tags = {it: tag for it, tag in group.tags.items() if it in group.lines or tag > group.clock}
            group.tags[job.client] = max(group.clock, group.tags.get(job.client, 0.0))
        group.lines.setdefault(job.client, {})[job.id] = job
        for prefix in job.prefixes:
            self._mates.setdefault((job.priority, prefix), {})[job.id] = job

    def remove(self, job: Job) -> None:
        del self._jobs[job.id]
        self._count(job, -1)
        if self._returned.pop(job.id, None) is not None:
            return
        group = self._classes[job.priority]
        del group.lines[job.client][job.id]
        if not group.lines[job.client]:
            del group.lines[job.client]
            if not group.lines:
                del self._classes[job.priority]
        for prefix in job.prefixes:
            mates = self._mates[job.priority, prefix]
            del mates[job.id]
            if not mates:
                del self._mates[job.priority, prefix]

    def take(self, budget: int, cached: Collection[str]) -> JobBatch:
        """Remove the next jobs, at least one, and return them."""
        batch = JobBatch(budget)
        first = self._first_priority()
        while (job := self._next(first)) is not None and self._move(job, batch, leads=True):
            if batch.jobs and batch.jobs[-1].attempts:  # it is alone because a worker died with it
                break
            for prefix in [*job.prefixes, *cached]:
                while mates := self._mates.get((job.priority, prefix)):
                    if not self._move(next(iter(mates.values())), batch):
                        break
            cached = ()  # all of them have come along, or there is no room
        return batch

    def _first_priority(self) -> int | None:
        """Return the priority that a batch begins with: the highest, or now and then the one that waits longest."""
        if not self._classes:
            return None
        now = time.monotonic()
        longest = min(self._classes, key=lambda priority: self._classes[priority].since)
        if min(now - self._aged, now - self._classes[longest].since) < backend.AGING_S:
            return max(self._classes)
        self._aged = now
        return longest

    def _next(self, first: int | None) -> Job | None:
        """Return the next job, of the priority `first` while that has any; None where none waits."""
        if self._returned:
            return min(self._returned.values(), key=lambda job: job.created)
        if not self._classes:
            return None
        group = self._classes[first if first in self._classes else max(self._classes)]
        client = min(group.lines, key=lambda name: (group.tags[name], name))
        return next(iter(group.lines[client].values()))

    def _move(self, job: Job, batch: JobBatch, *, leads: bool = False) -> bool:
        """Move a job into the batch, on its client's account; `leads` where it is that client's turn."""
        if not batch.has_room(job):
            return False
        group = None if job.id in self._returned else self._classes[job.priority]
        self.remove(job)
        tokens = batch.add(job)
        if group is not None:  # what was returned has been paid
            group.since = time.monotonic()
            if leads:
                group.clock = group.tags[job.client]
            group.tags[job.client] += tokens / job.weight
        return True

    def _count(self, job: Job, sign: int) -> None:
        self.items += sign * job.count
        self.bytes += sign * job.size


@dataclass
class _Entry:
    job: Job
    status: Status
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 1  # requests that share it, and neither have its result nor have left

    def is_shared(self, job: Job) -> bool:
        status = self.status
        return not status.finished or (status.revision in job.revisions and not has_errors(status.outcomes or ()))


class MemoryBackend:
    """A queue in one process, with bounds for each reward; a job that is accepted ends exactly once.

    What it says of its methods holds of `RedisBackend` as well. `errors` says what is wrong with what `start` began.
    Above `max_results` results or records, the oldest is dropped before its time.
    """

    persistent = False  # whether the queue outlives this process, so that other processes finish what waits

    def __init__(self, limits: Limits, each: tuple[int, int] | None = None):
        self._limits = limits
        self.errors: dict[str, str] = {}
        self._capacity = each or (limits.queue_items, limits.queue_bytes)
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[str, str] = {}
        self._queues: dict[str, FairQueue] = defaultdict(FairQueue)
        # By queue, the workers that wait for a job, and the prefixes that they have.
        self._idle: dict[str, dict[asyncio.Future[None], Collection[str]]] = defaultdict(dict)
        self._finished: OrderedDict[str, float] = OrderedDict()  # job id to when it finished, the oldest first
        self._records: TLRUCache[str, tuple[float, dict[str, Any]]] = TLRUCache(  # ttl, record
            limits.max_results, ttu=lambda _, record, now: now + record[0], timer=lambda: time.monotonic()
        )

    async def start(self) -> None:
        """Start, once and before any other call; a queue that is away is not waited for."""

    async def stop(self) -> None:
        """End what `start` began."""

    async def put(self, job: Job) -> str:
        """Accept a job and return its id, or that of an equal job: they share one result, and the later deadline.

        A finished job is shared only if no item has an error, and its result is of one of the job's `revisions`.
        """
        self._drop_old()
        equal = self._by_key.get(job.key, "")
        if (entry := self._entries.get(equal)) is not None and entry.is_shared(job):
            entry.waiters += 1
            shared = entry.job
            if shared.deadline is not None:
                shared.deadline = None if job.deadline is None else max(job.deadline, shared.deadline)
            if equal in self._finished:  # kept for another `result_ttl`
                self._finished[equal] = time.monotonic()
                self._finished.move_to_end(equal)
            return equal
        self._check_room(job)
        self._entries[job.id] = _Entry(job, Status(State.queued))
        self._by_key[job.key] = job.id
        self._queue(job)
        return job.id

    async def take(self, queue: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        """Wait for jobs in one of the `queues` and take the first ones, up to `budget` tokens and at least one.

        Jobs that were given back come first; one that a worker died with comes alone. Then goes the highest priority,
        yet every `AGING_S` at most one batch begins with the one that has waited longest. Within a priority clients
        share tokens by weight. Behind a job come those of its priority that share a prefix with it, and those of the
        prefixes `cached`, which the worker computed lately. A job whose deadline has passed is failed.
        """
        while True:
            batch = self._queues[queue].take(budget, cached)
            for job in batch.late:
                self._finish(job, Status(State.failed, error=backend.EXPIRED))
            for job in batch.jobs:
                self._entries[job.id].status = Status(State.running)
            if batch.jobs:
                return batch.jobs
            # Nothing is awaited since `take`, so no job can have come unseen.
            idle = self._idle[queue]
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
        """Store the result of a job that was taken, computed by this revision of its reward."""
        self._finish(job, Status(State.done, outcomes=list(outcomes), seconds=seconds, revision=revision))

    async def fail(self, job: Job, error: str) -> None:
        """Fail a job that was taken."""
        self._finish(job, Status(State.failed, error=error))

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        """Queue jobs again, before others, that were taken and not scored.

        With `blame`, what happened to their worker, it counts as an attempt of each: after the second it is failed.
        """
        for job in jobs:
            entry = self._entries.get(job.id)
            if entry is None or entry.status.finished:
                continue
            job.attempts += blame is not None
            if not entry.waiters:  # it was cancelled while it ran
                self._finish(job, Status(State.cancelled, error=backend.CANCELLED))
            elif job.attempts >= backend.MAX_ATTEMPTS:
                await self.fail(job, f"{blame}, {backend.GIVEN_UP}")
            else:
                entry.status = Status(State.queued)
                self._queue(job, returned=True)

    async def status(self, job_id: str) -> Status | None:
        """Return the status; None for a job that was never accepted, or has no result any longer."""
        self._drop_old()
        entry = self._entries.get(job_id)
        return None if entry is None else entry.status

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        """Return the status once the job is finished, or as it is after `timeout` seconds."""
        entry = self._entries.get(job_id)
        if entry is None:
            return None
        with move_on_after(timeout):
            await entry.finished.wait()
        if entry.status.finished:
            entry.waiters = max(entry.waiters - 1, 0)
        return entry.status

    async def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits and that no other request shares, and return whether it did."""
        entry = self._entries.get(job_id)
        if entry is None or entry.status.finished:
            return False
        entry.waiters = max(entry.waiters - 1, 0)
        if entry.waiters or entry.status.state is not State.queued:
            return False  # another request waits for it, or it runs
        self._queues[entry.job.queue].remove(entry.job)
        self._finish(entry.job, Status(State.cancelled, error=backend.CANCELLED))
        return True

    async def unfetched(self) -> Mapping[str, int]:
        """Count by reward the jobs with a request that still waits for the result: it ends with this process."""
        self._drop_old()
        return Counter(entry.job.reward for entry in self._entries.values() if entry.waiters)

    async def depth(self, reward: str) -> tuple[int, int]:
        """Return how many jobs wait for a reward, and their bytes."""
        both = [self._queues[name] for name in queues(reward)]
        return sum(map(len, both)), sum(queue.bytes for queue in both)

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        """Keep a protocol's record of a request, such as the ids of its jobs, for `ttl` seconds."""
        self._records[name] = ttl, record

    async def load_record(self, name: str) -> dict[str, Any] | None:
        """Return the record last saved under a name; None where there is none, or no longer."""
        return self._records.get(name, (0.0, None))[1]

    async def announcements(self) -> dict[str, dict[str, Any]]:
        """Return the last announcement of each process by name."""
        return {}  # there is no other process

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        """Publish the health of a process's workers to all that share the queue, for `ttl` seconds."""

    def _check_room(self, job: Job) -> None:
        both = [self._queues[name] for name in queues(job.reward)]
        has_items, has_bytes = sum(queue.items for queue in both), sum(queue.bytes for queue in both)
        max_items, max_bytes = self._capacity
        total = sum(queue.bytes for queue in self._queues.values())
        items, size = has_items + job.count, has_bytes + job.size
        if items > max_items or size > max_bytes or total + job.size > self._limits.queue_bytes:
            raise Overloaded(job.reward, has_items, has_bytes, total)

    def _queue(self, job: Job, *, returned: bool = False) -> None:
        self._queues[job.queue].push(job, returned=returned)
        idle = self._idle[job.queue]
        has_it = [woken for woken, cached in idle.items() if not job.prefixes.keys().isdisjoint(cached)]
        _wake(has_it[:1] if has_it and not has_it[0].done() else idle)

    def _finish(self, job: Job, status: Status) -> None:
        entry = self._entries[job.id]
        entry.status = status
        entry.job.packed = b""  # only the result is kept
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


def _wake(idle: Iterable[asyncio.Future[None]]) -> None:
    for woken in idle:
        if not woken.done():
            woken.set_result(None)
