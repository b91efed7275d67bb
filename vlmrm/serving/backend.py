"""Define the queue of jobs and their results; `memory_backend` and `redis_backend` implement it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NoReturn, Protocol

from vlmrm.conversation import Outcome
from vlmrm.errors import VlmrmError
from vlmrm.formats.wire import Item
from vlmrm.serving.worker.channel import pack

logger = logging.getLogger("vlmrm")

AGING_S = 5.0  # at most, until a batch begins with the priority that has waited longest for a turn
MAX_ATTEMPTS = 2  # workers that one job may kill
GIVEN_UP = "for the second time with this request: it is not tried again"
EXPIRED = "its deadline had passed before it was begun"
NOT_SERVED = "the revision that it demands was no longer served when its turn came"
CANCELLED = "it was cancelled"
SLOW = "\nslow"  # ends the name of the queue of what takes long to prepare


def queues(reward: str) -> tuple[str, str]:
    """Return the names of a reward's two queues: of what is prepared quickly, and of what takes long."""
    return reward, reward + SLOW


class State(StrEnum):
    """The state of a job; the result of an `expired` one is no longer kept."""

    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"


@dataclass
class Job:
    """The items that one request sends to one reward, scored together or not at all."""

    reward: str
    packed: bytes  # which a worker alone opens; b"" once nobody has to
    count: int  # items
    cost: int = 1  # estimated tokens and decoding, for the budget of a batch; what several items share counts once
    prefixes: Mapping[str, int] = field(default_factory=dict)  # by the digest of each prompt, its part of `cost`
    priority: int = 0  # higher goes first
    client: str = ""  # whose fair share of the reward it counts against
    request_id: str = ""
    trace: str = ""  # the W3C traceparent of its request
    wanted: str = ""  # the revision that must compute it
    weight: float = 1.0  # of the client's share
    deadline: float | None = None  # of `time.monotonic`, after which it is not begun
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    slow: bool = False  # to prepare: nothing quick waits for it
    attempts: int = 0  # how often a worker died or hung with it
    receipt: str = ""  # the delivery that this is, in a queue that may deliver a job again
    revisions: Sequence[str] = ()  # served now; an earlier result is reused if it is of one of them

    @classmethod
    def of(cls, reward: str, items: Sequence[Item], **settings: Any) -> Job:
        """Return a job of these items; nothing else packs them."""
        return cls(reward, pack({"reward": reward, "items": list(items)}), len(items), **settings)

    @property
    def size(self) -> int:
        return len(self.packed)

    @property
    def queue(self) -> str:
        return queues(self.reward)[self.slow]

    @cached_property
    def key(self) -> str:
        """Return the digest of the content: equal jobs have equal results while their reward has the same revision."""
        digest = hashlib.sha256(self.packed)
        digest.update(self.wanted.encode())  # what demands a revision is not computed by another
        return digest.hexdigest()


@dataclass
class Status:
    """The state of a job with its `outcomes` once it is done, or the `error` once it failed."""

    state: State
    outcomes: list[Outcome] | None = None
    error: str | None = None
    seconds: float | None = None  # of computing
    revision: str | None = None  # of the reward that computed it

    @property
    def finished(self) -> bool:
        return self.state not in (State.queued, State.running)


def has_errors(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.error is not None for outcome in outcomes)


class QueueAway(VlmrmError):
    """The queue cannot be reached; a retry after `retry_after` seconds may succeed."""

    def __init__(self, message: str, retry_after: float = 2.0):
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(QueueAway):
    """The queue is full; its `pace` is of items a second, or 0."""

    def __init__(self, reward: str, items: int, size: int, total: int, pace: float):
        full = f"the queue of {reward} is full, with {items} items in {size} bytes, {total} in all queues"
        super().__init__(f"{full}: try again later.", min(max(items / 2 / pace, 1.0), 60.0) if pace else 1.0)


class Backend(Protocol):
    """A queue with bounds of its own for each reward; a job that is accepted ends exactly once, whatever happens."""

    persistent: bool
    """Whether the queue outlives this process, so that other processes finish what waits."""

    errors: dict[str, str]
    """What is wrong with work that `start` began and that goes on beside all calls, by what it is."""

    async def start(self) -> None:
        """Start, once and before any other call; a queue that is away is not waited for."""
        return

    async def stop(self) -> None:
        """End what `start` began."""
        return

    async def put(self, job: Job) -> str:
        """Accept a job and return its id, or that of an equal job: they share one result, and the later deadline.

        A finished job is shared only if no item has an error, and its result is of one of the job's `revisions`.
        """

    async def take(self, queue: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        """Wait for jobs in one of the `queues` and take the first ones, up to `budget` tokens and at least one.

        Jobs that were given back come first; one that a worker died with comes alone. Then goes the highest priority,
        yet every `AGING_S` at most one batch begins with the one that has waited longest. Within a priority clients
        share tokens by weight. Behind a job come those of its priority that share a prefix with it, and those of the
        prefixes `cached`, which the worker computed lately. A job whose deadline has passed is failed.
        """

    async def finish(self, job: Job, outcomes: Sequence[Outcome], seconds: float, revision: str) -> None:
        """Store the result of a job that was taken, computed by this revision of its reward."""

    async def fail(self, job: Job, error: str) -> None:
        """Fail a job that was taken."""

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        """Queue jobs again, before others, that were taken and not scored.

        With `blame`, what happened to their worker, it counts as an attempt of each: after the second it is failed.
        """

    async def status(self, job_id: str) -> Status | None:
        """Return the status; None for a job that was never accepted, or has no result any longer."""

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        """Return the status once the job is finished, or as it is after `timeout` seconds."""

    async def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits and that no other request shares, and return whether it did."""

    async def unfetched(self) -> Mapping[str, int]:
        """Count by reward the jobs with a request that still waits for the result: it ends with this process."""

    async def depth(self, reward: str) -> tuple[int, int]:
        """Return how many jobs wait for a reward, and their bytes."""

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        """Keep a protocol's record of a request, such as the ids of its jobs, for `ttl` seconds."""

    async def load_record(self, name: str) -> dict[str, Any] | None:
        """Return the record last saved under a name; None where there is none, or no longer."""

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        """Publish the health of a process's workers to all that share the queue, for `ttl` seconds."""
        return

    async def announcements(self) -> dict[str, dict[str, Any]]:
        """Return the last announcement of each process by name."""


async def repeat(
    what: str, work: Callable[[], Awaitable[object]], pause: float, errors: MutableMapping[str, str]
) -> NoReturn:
    """Do `work`, and again `pause` seconds after its end, until cancelled; `errors` says under `what` why it fails."""
    while True:
        try:
            await work()
            if errors.pop(what, None) is not None:
                logger.info("%s works again", what)
        except Exception as error:
            message = f"{what} fails ({type(error).__name__}) and is tried again: the log of the service says more."
            if errors.get(what) != message:
                logger.exception("%s fails, and is tried again", what)
            errors[what] = message
        await asyncio.sleep(pause)
