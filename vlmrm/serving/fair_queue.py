"""The order of the jobs that wait for one reward: by priority, in fair shares of clients, with those of a prompt."""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from vlmrm.serving import backend
from vlmrm.serving.backend import Job

RECENT = 256  # prefixes that a worker is thought to keep
FORGOTTEN = 1000  # clients without a job whose shares are remembered, above which only those ahead are


@dataclass
class _Class:
    """The jobs of one priority.

    Clients share it by start-time fair queueing (Goyal et al. 1996): each is served at the virtual time of its tag, by
    which it has had its share; `clock` is the tag of the client that was served last, from which a new one starts.
    """

    since: float  # when it last had a job taken, or its first one came
    clock: float = 0.0
    lines: dict[str, dict[str, Job]] = field(default_factory=dict)  # by client, the oldest job first
    tags: dict[str, float] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)  # of tags, old ones too


@dataclass
class JobBatch:
    """The jobs that one `take` returns; `late` are those past their deadline."""

    room: int  # tokens
    jobs: list[Job] = field(default_factory=list)
    late: list[Job] = field(default_factory=list)
    _prefixes: set[str] = field(default_factory=set)

    @property
    def is_closed(self) -> bool:
        """Whether its job is alone because a worker died with it."""
        return bool(self.jobs and self.jobs[-1].attempts)

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


class RecentPrefixes(LRUCache[str, None]):
    """The prefixes of the jobs that a worker was given last, for `Backend.take`; `clear` them when it starts anew."""

    def __init__(self) -> None:
        super().__init__(RECENT)

    def add(self, jobs: Sequence[Job]) -> None:
        """Add those of jobs that the worker is given now."""
        self.update(dict.fromkeys(prefix for job in jobs for prefix in job.prefixes))


def tokens_of(jobs: Sequence[Job]) -> int:
    """Estimate the tokens of a batch of these jobs; a prefix that they share counts once."""
    batch = JobBatch(0)
    return sum(map(batch.add, jobs))


class FairQueue:
    """The jobs that wait for one reward; `Backend.take` defines their order."""

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
            group.tags[job.client] = max(group.clock, group.tags.get(job.client, 0.0))
            self._schedule(group, job.client)
        group.lines.setdefault(job.client, {})[job.id] = job
        for prefix in job.prefixes:
            self._mates.setdefault((job.priority, prefix), {})[job.id] = job

    def remove(self, job: Job) -> None:
        """Remove a job that waits."""
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
            if batch.is_closed:
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
        while True:
            tag, client = group.heap[0]
            if client in group.lines and group.tags[client] == tag:
                return next(iter(group.lines[client].values()))
            heapq.heappop(group.heap)

    def _move(self, job: Job, batch: JobBatch, *, leads: bool = False) -> bool:
        """Move a job into the batch, on its client's account; False where it has no room there.

        Args:
            leads: whether it is its client's turn.
        """
        if not batch.has_room(job):
            return False
        group = None if job.id in self._returned else self._classes[job.priority]
        self.remove(job)
        tokens = batch.add(job)
        if group is not None:  # what was returned has been paid
            group.since = time.monotonic()
            if leads:
                group.clock = group.tags[job.client]
            group.tags[job.client] += tokens
            if job.client in group.lines:
                self._schedule(group, job.client)
        return True

    def _schedule(self, group: _Class, client: str) -> None:
        heapq.heappush(group.heap, (group.tags[client], client))
        if len(group.tags) > 2 * len(group.lines) + FORGOTTEN:
            group.tags = {name: tag for name, tag in group.tags.items() if name in group.lines or tag > group.clock}

    def _count(self, job: Job, sign: int) -> None:
        self.items += sign * len(job.items)
        self.bytes += sign * job.size
