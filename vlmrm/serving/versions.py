"""Versions of a reward's model: another is loaded beside it, proved, put in its place, and rolled back, under load.

What a reward shall be is a `Wanted`. With a shared queue it is a record there, which all processes read, and each
brings its own workers to it, again and again until they are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import Field

from vlmrm.conversation import Outcome
from vlmrm.errors import VlmrmError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import Backend, QueueAway
from vlmrm.serving.health import WorkerHealth
from vlmrm.serving.replica import Candidate, Replica
from vlmrm.serving.settings import RewardSettings, ServiceSettings
from vlmrm.serving.worker_process import RewardRaised, WorkerDied
from vlmrm.serving.worker_spec import is_trained, worker_specs
from vlmrm.settings import Strict

T = TypeVar("T")

logger = logging.getLogger("vlmrm")

RECORD_S = 10 * 365 * 86400.0  # for which a shared queue keeps which model is wanted
RETRY_S = (10.0, 600.0)  # between two tries to follow other processes: the first, the longest
PROBE: list[Item] = [  # that any model trained here can score
    {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": answer}]}
    for answer in ("4", "I do not know.", "It is 5, as everybody knows.")
]


class CannotSwitch(VlmrmError):
    """Another model cannot take a reward's place; the one that is served stays."""


class ModelRequest(Strict):
    """A model that shall compute a reward from now on."""

    model: str = Field(min_length=1, description="A folder below one of model_roots, or a repository they allow.")


class ModelState(Strict):
    """The model that a reward shall have, the one before, and what its workers have of it."""

    reward: str
    model: str = Field(description="That is wanted.")
    revisions: list[str] = Field(description="Of the workers that are ready; several while it changes.")
    previous: str | None = Field(None, description="That a rollback puts in place again.")
    changing: bool = False
    asleep: bool = False
    error: str | None = Field(None, description="What is wrong with workers, such as why they refuse a model.")


@dataclass(frozen=True)
class Wanted:
    """What a reward shall be, in all processes that share its queue.

    Args:
        configured: the model of the configuration; of another one a record is not followed.
        id: of the change to this model; "" for that of the configuration.
        expected: the revision that it must be; "" for any.
        is_proved: whether workers serve it, so that others may begin with it.
        previous: the model before that workers served, and as which revision; "" where unknown.
    """

    configured: str
    model: str
    id: str = ""
    expected: str = ""
    is_proved: bool = True
    asleep: bool = False
    previous: str = ""
    previous_revision: str = ""

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Wanted:
        """Read what another process recorded; it may be of another version of vlmrm."""
        return cls(**{name: value for name, value in record.items() if name in cls.__dataclass_fields__})


class Versions:
    """The versions of one reward's model, in this process and in those that share its queue.

    Run `follow` again and again, and start the replicas once it is `begun`: before that it is not known which model is
    wanted.

    Args:
        replicas: of this process.
        announce: tells the other processes what is served now; may raise QueueAway.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        reward: RewardSettings,
        replicas: Sequence[Replica],
        backend: Backend,
        announce: Callable[[], Awaitable[None]],
    ):
        self.begun = asyncio.Event()
        self._settings, self._reward, self._replicas = settings, reward, replicas
        self._backend, self._announce = backend, announce
        self._name, self._key = reward.name, f"model:{reward.name}"
        self._wanted = Wanted(reward.model_path, reward.model_path)
        self._served: str | None = ""  # the id of what is served; None where replicas may differ
        self._unsaved = False  # the shared queue does not know what is wanted
        self._changing = False
        self._failed = ("", 0.0, 0.0)  # the id of what could not be followed, when it is tried again, the pause
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # What is asked for -----------------------------------------------------------------------------------------------

    def state(self, health: WorkerHealth) -> ModelState:
        """Return the state of the reward, given its workers' health."""
        wanted, errors = self._wanted, list(health.errors)
        if self._unsaved:
            errors.append("other processes do not know of this yet: the queue is away.")
        return ModelState(
            reward=self._name,
            model=wanted.model,
            revisions=health.revisions,
            previous=wanted.previous or None,
            changing=self._changing or not (wanted.is_proved or errors),
            asleep=wanted.asleep,
            error="; ".join(errors) or None,
        )

    async def change(self, request: ModelRequest) -> None:
        """Have the model of `request` compute the reward, in all processes with workers; this one's do at the return.

        It goes on where its caller is cancelled.
        """
        await self._change_alone(request.model, "")

    async def roll_back(self) -> None:
        """Have the previous model compute the reward again; raises as `change` does."""
        await self._refresh()
        wanted = self._wanted
        if not wanted.previous:
            raise CannotSwitch(f"{self._name} has had no other model.")
        await self._change_alone(wanted.previous, wanted.previous_revision)

    async def sleep(self, asleep: bool) -> None:
        """Free the accelerator's memory of the reward's workers, or fill it again, as `change` does."""
        await self._to_its_end(self._sleep(asleep))

    async def stop(self) -> None:
        """Give up changes that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that goes on where its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def _check_allowed(self, model: str) -> None:
        """Raise CannotSwitch unless a model is the configured one, or the operator allows it."""
        wanted = self._wanted
        if not wanted.configured:
            raise CannotSwitch(f"{self._name} has no model_path: its model cannot be changed.")
        if model in (wanted.configured, wanted.model):
            return
        path = Path(model)
        for root in self._settings.model_roots:
            folder = Path(root)
            if folder.is_absolute() and path.is_absolute():
                if path.is_dir() and path.resolve().is_relative_to(folder.resolve()):
                    return
            elif not folder.is_absolute() and fnmatch(model, root) and is_repository(model):
                return
        raise CannotSwitch(
            f"the model {path.name} is no folder below one of model_roots, and no repository that they allow."
        )

    # How it is done --------------------------------------------------------------------------------------------------

    async def _change_alone(self, model: str, expected: str) -> None:
        self._check_allowed(model)
        if self._changing:
            raise CannotSwitch(f"the model of {self._name} is being changed: try again once it is done.")
        self._changing = True
        await self._to_its_end(self._change(model, expected))

    async def _change(self, model: str, expected: str) -> None:
        try:
            async with self._lock:
                await self._refresh()
                before, replicas = self._wanted, self._replicas
                served = next((replica.model_revision for replica in replicas), "")
                # What has never been served is nothing to come back to.
                previous = (before.model, served) if before.is_proved else (before.previous, before.previous_revision)
                made = (model, uuid.uuid4().hex, expected, bool(replicas))
                wanted = Wanted(before.configured, *made, before.asleep, *previous)
                if replicas:
                    await self._apply(wanted)
                if _is_repeated(before, wanted, served, replicas):
                    wanted = replace(wanted, previous=before.previous, previous_revision=before.previous_revision)
                await self._want(wanted)
        finally:
            self._changing = False

    async def _sleep(self, asleep: bool) -> None:
        async with self._lock:
            await self._refresh()
            await self._want(replace(self._wanted, asleep=asleep))
            try:
                await self._apply_sleep()
            except WorkerDied as error:
                raise CannotSwitch(f"the worker of {self._name} {error}") from error

    async def _apply_sleep(self) -> None:
        asleep = self._wanted.asleep
        others = (replica for replica in self._replicas if replica.asleep != asleep)
        await _all(replica.sleep() if asleep else replica.wake() for replica in others)

    async def _apply(self, wanted: Wanted) -> None:
        """Load the model in workers of its own, prove it, and switch all replicas of this process to them."""
        replicas, reward = self._replicas, self._reward_of(wanted.model)
        for replica in replicas:
            if replica.lost:
                raise CannotSwitch(f"its place cannot be taken: {replica.error}")
        try:
            candidates = await _all(map(Candidate.load, worker_specs(reward, self._settings.limits.silence)), _stop)
            try:
                await _all(_prove(reward, wanted.expected, candidate) for candidate in candidates)
                self._served = None
                await _all(replica.switch(new) for replica, new in zip(replicas, candidates, strict=True))
            except BaseException:
                pairs = zip(replicas, candidates, strict=True)
                await asyncio.gather(*(_stop(new) for replica, new in pairs if replica.spec is not new.spec))
                raise
        except (WorkerDied, RewardRaised) as error:
            raise CannotSwitch(f"the model {Path(wanted.model).name} is not put in place: it {error}") from error
        self._served = wanted.id
        logger.info("%s is computed by the model %s now", self._name, Path(wanted.model).name)
        with suppress(QueueAway):
            await self._announce()

    def _reward_of(self, model: str) -> RewardSettings:
        return self._reward.model_copy(update={"model_path": model})

    # Processes that share a queue ------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Bring the reward to what is wanted; other processes may have been asked for it."""
        async with self._lock:
            with suppress(QueueAway):  # until the next round
                if self._unsaved:
                    await self._want(self._wanted)
                await self._refresh()
                if self._replicas:
                    await self._reconcile()

    async def _reconcile(self) -> None:
        wanted = self._wanted
        failed, again, pause = self._failed
        if self._served != wanted.id and (failed != wanted.id or time.monotonic() >= again):
            self._changing = True
            try:
                await self._apply(wanted)
            except CannotSwitch as error:
                pause = min(2 * pause, RETRY_S[1]) if failed == wanted.id else RETRY_S[0]
                self._failed = (wanted.id, time.monotonic() + pause, pause)
                for replica in self._replicas:
                    replica.refusal = str(error)
                again = f"it is tried again in {pause:g} s"
                logger.error("the model of %s is not changed: %s; %s", self._name, str(error).rstrip("."), again)
            finally:
                self._changing = False
        if self._served == wanted.id and not wanted.is_proved:
            await self._want(replace(wanted, is_proved=True))
        with suppress(WorkerDied):  # as its health says
            await self._apply_sleep()

    async def _refresh(self) -> None:
        """Read what is wanted of a reward, unless its configuration has changed since; raises QueueAway."""
        if self._backend.persistent and not self._unsaved:
            record = await self._backend.load_record(self._key)
            if record is not None and record["configured"] == self._wanted.configured:
                self._wanted = Wanted.read(record)
            elif record is not None and not self.begun.is_set():
                model = Path(record["model"]).name
                logger.info("%s begins as configured, which is not as it was when %s was wanted", self._name, model)
        if not self.begun.is_set():
            self._begin()

    def _begin(self) -> None:
        """Have replicas begin with what is wanted, before anybody starts them."""
        wanted = self._wanted
        model = wanted.model if wanted.is_proved else wanted.previous  # beside which `follow` then tries the other
        self._served = wanted.id if wanted.is_proved else None
        specs = worker_specs(self._reward_of(model), self._settings.limits.silence)
        for replica, spec in zip(self._replicas, specs, strict=False):
            replica.spec, replica.asleep = spec, wanted.asleep
        if model != wanted.configured:
            logger.info("%s begins with the model %s, which was wanted last", self._name, Path(model).name)
        if wanted.asleep:
            logger.info("%s begins asleep, as was wanted last", self._name)
        self.begun.set()

    async def _want(self, wanted: Wanted) -> None:
        """Record what is wanted. If the queue is away, what workers here do already is told to others later."""
        try:
            if self._backend.persistent:
                await self._backend.save_record(self._key, asdict(wanted), RECORD_S)
            self._unsaved = False
        except QueueAway:
            if not self._replicas:
                raise
            self._unsaved = True
        self._wanted = wanted


async def _prove(reward: RewardSettings, expected: str, candidate: Candidate) -> None:
    """Raise CannotSwitch unless a model is the expected one, where one is, and scores a probe twice alike."""
    name = Path(reward.model_path).name
    if expected not in ("", candidate.revision):
        raise CannotSwitch(f"the files of {name} have changed since it was served.")
    if not is_trained(reward):
        return
    first, second = [(await candidate.worker.score(PROBE, reward.batch_timeout))[0] for _ in range(2)]
    bad = next((outcome.error for outcome in first if outcome.error is not None), None)
    if bad is not None or not np.allclose(_scores(first), _scores(second), atol=1e-3):
        raise CannotSwitch(f"the model {name} does not score a probe of {len(PROBE)} texts twice alike: {bad or ''}")


def _is_repeated(before: Wanted, wanted: Wanted, served: str, replicas: Sequence[Replica]) -> bool:
    """Return whether a change put in place what was there, so that a rollback still means the model before that."""
    if replicas:
        return replicas[0].model_revision == served
    return wanted.model == before.model


def is_repository(model: str) -> bool:
    """Return whether a name can only be a repository's: one of a folder, such as org/../../etc, would be opened."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return not Path(model).exists()


async def _all(work: Iterable[Awaitable[T]], undo: Callable[[T], Awaitable[None]] | None = None) -> list[T]:
    """Return the results of all; where one fails, `undo` those that did not, and raise its error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    done = [result for result in results if not isinstance(result, BaseException)]
    for error in results:
        if isinstance(error, BaseException):
            if undo is not None:
                await asyncio.gather(*map(undo, done))
            raise error
    return done


async def _stop(candidate: Candidate) -> None:
    await candidate.worker.stop()


def _scores(outcomes: Sequence[Outcome]) -> list[float]:
    return [math.nan if outcome.score is None else outcome.score for outcome in outcomes]
