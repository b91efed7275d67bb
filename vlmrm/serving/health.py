"""The registry of workers: each process announces the health of its own, and reads that of all on the same queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from vlmrm.serving.backend import Backend, QueueAway, process_name
from vlmrm.serving.replica import Replica
from vlmrm.serving.worker.channel import redact_paths


@dataclass
class WorkerHealth:
    """The health of one reward's workers: how many there are, are ready, asleep, and failing to load.

    Of those that fail, `lost` will not try again. `info` is what one of them says about its reward; `revisions` are
    those of loaded workers, several during a rolling update.
    """

    workers: int = 0
    ready: int = 0
    asleep: int = 0
    failing: int = 0
    lost: int = 0
    restarts: int = 0  # since their processes started
    errors: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    revisions: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, replica: Replica) -> WorkerHealth:
        """Return the health of one worker of this process."""
        return cls(
            workers=1,
            ready=int(replica.ready and not replica.asleep),
            asleep=int(replica.asleep),
            failing=int(replica.error is not None and not replica.ready),
            lost=int(replica.lost),
            restarts=replica.restarts,
            errors=[redact_paths(error) for error in (replica.error, replica.refusal) if error],
            info={**replica.info, "revision": replica.revision} if replica.revision else {},
            revisions=[replica.revision] if replica.revision and (replica.ready or replica.asleep) else [],
        )

    @classmethod
    def read(cls, announced: Mapping[str, Any]) -> WorkerHealth:
        """Read what a process announced; in a rolling update it may be of another version of vlmrm."""
        return cls(**{name: value for name, value in announced.items() if name in cls.__dataclass_fields__})

    @classmethod
    def merge(cls, parts: Iterable[WorkerHealth]) -> WorkerHealth:
        """Return the health of the workers of all parts together."""
        parts = list(parts)
        counts = ("workers", "ready", "asleep", "failing", "lost", "restarts")
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            errors=sorted({error for part in parts for error in part.errors}),
            info=next((part.info for part in parts if part.info), {}),
            revisions=sorted({revision for part in parts for revision in part.revisions}),
        )

    @property
    def unavailable(self) -> bool:
        """Return whether there are workers, and none of them can load."""
        return 0 < self.workers == self.failing


class WorkerRegistry:
    """The health of all workers, kept up to date by rounds of `update`; `error` says why it is not.

    Args:
        replicas: of this process, by reward.
        silence: seconds after which a process that has not announced itself is dropped.
    """

    def __init__(self, backend: Backend, replicas: Mapping[str, Sequence[Replica]], silence: float):
        self.error: str | None = None
        self._name = process_name()
        self._backend, self._replicas, self._silence = backend, replicas, silence
        self._remote: list[dict[str, WorkerHealth]] = []  # of each other process, by reward

    def health(self, reward: str) -> WorkerHealth:
        """Return the health of a reward's workers in all processes, in this one as of now."""
        local = map(WorkerHealth.of, self._replicas.get(reward, []))
        return WorkerHealth.merge([*local, *(rewards[reward] for rewards in self._remote if reward in rewards)])

    async def update(self) -> None:
        """Announce and refresh."""
        try:
            await self.announce()
            await self.refresh()
            self.error = None
        except QueueAway as error:  # what was announced last stays valid meanwhile
            self.error = str(error)

    async def announce(self) -> None:
        """Tell other processes of this one's workers; raises QueueAway."""
        rewards = {
            name: asdict(WorkerHealth.merge(map(WorkerHealth.of, replicas)))
            for name, replicas in self._replicas.items()
            if replicas
        }
        if rewards:
            await self._backend.announce(self._name, rewards, self._silence)

    async def refresh(self) -> None:
        """Read what other processes announced; raises QueueAway."""
        announcements = await self._backend.announcements()
        self._remote = [
            {name: WorkerHealth.read(health) for name, health in rewards.items()}
            for process, rewards in announcements.items()
            if process != self._name
        ]

    async def unregister(self) -> None:
        """Announce that this process has no workers any more."""
        with suppress(QueueAway):  # its silence will tell
            await self._backend.announce(self._name, {}, 0)
