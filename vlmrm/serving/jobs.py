"""What the service works on: a job is what one request asks of one reward; it is queued, running, done or failed."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import Item
from vlmrm.serving.worker.channel import pack


class State(StrEnum):
    """Where a job is. `expired` is one whose result was kept long enough."""

    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"


@dataclass
class Job:
    """Items for one reward, scored together or not at all.

    Args:
        reward: the name that the configuration gives it.
        items: scored in this order; those of equal `group` prefixes share computation wherever they come from.
        cost: estimated tokens, for the budget of a batch.
        priority: higher goes first.
        deadline: seconds since the epoch after which nobody waits for it; it is then not begun.
        attempts: times that a worker died or hung with it.
        packed: reward and items as one piece of bytes, of which `size` is the length.
        receipt: which taking of it this is, where a queue must know.
        revisions: of the reward, as it is served when this is put: a result that is there is taken from these alone.
    """

    reward: str
    items: list[Item]
    cost: int = 1
    priority: int = 0
    deadline: float | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    attempts: int = 0
    packed: bytes = b""
    receipt: str = ""
    revisions: Sequence[str] = ()
    size: int = field(init=False)

    def __post_init__(self):
        self.packed = self.packed or pack({"reward": self.reward, "items": self.items})
        self.size = len(self.packed)

    @cached_property
    def key(self) -> str:
        """Equal for jobs that have equal results, as long as their reward is of one revision."""
        return hashlib.sha256(self.packed).hexdigest()


@dataclass
class Status:
    """What is known of a job; `outcomes` once it is done, `error` once it failed."""

    state: State
    outcomes: list[Outcome] | None = None
    error: str | None = None
    seconds: float | None = None  # of computing
    revision: str | None = None  # of the reward that computed it

    @property
    def over(self) -> bool:
        return self.state not in (State.queued, State.running)


def has_errors(outcomes: Sequence[Outcome]) -> bool:
    """Whether some item has no score."""
    return any(outcome.error is not None for outcome in outcomes)
