"""The jobs of the queue and their results, which `memory_backend` or `redis_backend` keeps."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from vlmrm.conversation import Outcome
from vlmrm.errors import VlmrmError
from vlmrm.formats.wire import Item
from vlmrm.serving.worker.channel import pack

if TYPE_CHECKING:
    from vlmrm.serving.memory_backend import MemoryBackend
    from vlmrm.serving.redis_backend import RedisBackend

    Backend: TypeAlias = MemoryBackend | RedisBackend

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
    """The queue is full."""

    def __init__(self, reward: str, items: int, size: int, total: int):
        full = f"the queue of {reward} is full, with {items} items in {size} bytes, {total} in all queues"
        super().__init__(f"{full}: try again later.")


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
