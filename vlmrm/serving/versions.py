"""Versions of a reward's model: another is loaded beside it, proved, put in its place, and rolled back, under load."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import Field

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import Backend, QueueAway
from vlmrm.serving.health import WorkerHealth
from vlmrm.serving.replica import Candidate, CannotSwitch, Replica
from vlmrm.serving.settings import RewardSettings, ServiceSettings
from vlmrm.serving.worker_process import RewardRaised, WorkerDied
from vlmrm.serving.worker_spec import WorkerSpec, is_trained, worker_spec
from vlmrm.settings import Strict

T = TypeVar("T")

logger = logging.getLogger("vlmrm")

SHADOW_S = 60.0  # for live traffic to come
RECORD_S = 10 * 365 * 86400.0  # for which a shared queue keeps which model is wanted
PROBE: list[Item] = [  # that any model trained here can score
    {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": answer}]}
    for answer in ("4", "I do not know.", "It is 5, as everybody knows.")
]


class ModelRequest(Strict):
    """A model that shall compute a reward from now on, and what is asked of it first."""

    model: str = Field(min_length=1, description="A folder below one of model_roots, or a repository they allow.")
    beside: bool = Field(True, description="Load it while the old one serves; false frees the old one's memory first.")
    shadow: int = Field(0, ge=0, le=10_000, description="Items of live traffic that both score before the switch.")
    max_difference: float | None = Field(
        None, ge=0, description="Of the scores of live traffic, on average; above it the old one stays."
    )


class Difference(Strict):
    """How far the scores of live traffic by a new model are from those of the old one; null where there were none."""

    items: int
    mean: float | None
    largest: float | None
    correlation: float | None


class ModelState(Strict):
    """The model that computes a reward, the one before, and whether it changes or sleeps now."""

    reward: str
    model: str
    revisions: list[str] = Field(description="Of the workers that are ready; several while it changes.")
    previous: str | None = None
    changing: bool = False
    asleep: bool = False
    error: str | None = Field(None, description="What is wrong with workers, such as why they refuse a model.")
    difference: Difference | None = None


@dataclass(frozen=True)
class Version:
    """A model, the revision that it was served as, and whether its successor had room beside it."""

    model: str
    revision: str
    beside: bool


class Versions:
    """The models of the rewards that `replicas` compute, in this process and in those that share its queue.

    With a shared queue, what is wanted is a record in it, which each process with workers follows.

    Args:
        announce: tells the other processes what is served now; may raise QueueAway.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        replicas: Mapping[str, Sequence[Replica]],
        backend: Backend,
        announce: Callable[[], Awaitable[None]],
    ):
        self._announce = announce
        self._settings, self._replicas, self._backend = settings, replicas, backend
        self._rewards = {reward.name: reward for reward in settings.reward_args}
        self._configured = {name: reward.model_path for name, reward in self._rewards.items()}
        self._previous: dict[str, Version] = {}
        self._differences: dict[str, Difference] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._followed: dict[str, str] = {}  # the id of the record that a reward's replicas follow

    # What is asked for -----------------------------------------------------------------------------------------------

    def state(self, name: str, health: WorkerHealth) -> ModelState:
        """Return the state of a reward whose workers have this health."""
        previous = self._previous.get(name)
        return ModelState(
            reward=name,
            model=self._rewards[name].model_path,
            revisions=health.revisions,
            previous=None if previous is None else previous.model,
            changing=self._locks[name].locked(),
            asleep=bool(health.asleep),
            error="; ".join(health.errors) or None,
            difference=self._differences.get(name),
        )

    async def change(self, name: str, wanted: ModelRequest, expected: str = "") -> None:
        """Have the model of `wanted` compute the reward, in all processes with workers; this one's do at the return.

        It goes on where its caller is cancelled.

        Args:
            expected: the revision that it must be, where that is known.

        Raises:
            CannotSwitch: saying why; the old model then still computes it.
            QueueAway: as `Backend.save_record`.
        """
        self._check_allowed(name, wanted.model)
        if wanted.shadow and not (self._replicas[name] and wanted.beside):
            raise CannotSwitch("shadow needs workers in this process, and beside: ask a process that has some.")
        if self._locks[name].locked():
            raise CannotSwitch(f"the model of {name} is being changed: try again once it is done.")
        await asyncio.shield(asyncio.ensure_future(self._change(name, wanted, expected)))

    async def roll_back(self, name: str) -> None:
        """Have the previous model compute the reward again; raises as `change` does."""
        if name not in self._previous:
            raise CannotSwitch(f"{name} has had no other model since this service started.")
        previous = self._previous[name]
        await self.change(name, ModelRequest(model=previous.model, beside=previous.beside), previous.revision)

    async def sleep(self, name: str, asleep: bool) -> None:
        """Free the accelerator's memory of the reward's workers, or fill it again; raises CannotSwitch."""
        async with self._locks[name]:
            try:
                await _all(replica.sleep() if asleep else replica.wake() for replica in self._replicas[name])
            except (RewardRaised, WorkerDied) as error:
                raise CannotSwitch(f"the worker of {name} cannot do so: {error}") from error
            await self._record(name, ModelRequest(model=self._rewards[name].model_path), asleep)

    def _check_allowed(self, name: str, model: str) -> None:
        """Raise CannotSwitch unless a model is the configured one, or the operator allows it."""
        reward = self._rewards[name]
        if not reward.model_path:
            raise CannotSwitch(f"{name} has no model_path: its model cannot be changed.")
        if model in (self._configured[name], reward.model_path):
            return
        path = Path(model)
        for root in self._settings.model_roots:
            folder = Path(root)
            if folder.is_absolute() and path.is_absolute():
                if path.is_dir() and path.resolve().is_relative_to(folder.resolve()):
                    return
            elif not folder.is_absolute() and fnmatch(model, root) and _is_repository(model):
                return
        raise CannotSwitch(
            f"the model {path.name} is no folder below one of model_roots, and no repository that they allow."
        )

    # How it is done --------------------------------------------------------------------------------------------------

    async def _change(self, name: str, wanted: ModelRequest, expected: str) -> None:
        async with self._locks[name]:
            await self._apply(name, wanted, expected)
            await self._record(name, wanted, asleep=False)

    async def _apply(self, name: str, wanted: ModelRequest, expected: str = "") -> None:
        """Change the model of this process's replicas, of all or of none."""
        replicas, before = self._replicas[name], self._rewards[name]
        reward = before.model_copy(update={"model_path": wanted.model})
        silence = self._settings.limits.silence
        specs = [worker_spec(reward, device, silence) for device in devices_of(reward)] if replicas else []
        old = next((replica.model_revision for replica in replicas), "")
        self._differences.pop(name, None)
        try:
            for replica in replicas:
                if replica.error is not None:
                    raise CannotSwitch(f"its place cannot be taken: {replica.error}")
            await (self._put_beside if wanted.beside else self._put_instead)(reward, wanted, specs, expected)
        except (WorkerDied, RewardRaised) as error:
            raise CannotSwitch(f"the model {Path(wanted.model).name} is not put in place: it {error}") from error
        self._rewards[name] = reward
        self._previous[name] = Version(before.model_path, old, wanted.beside)
        logger.info("%s is computed by the model %s now", name, Path(wanted.model).name)
        with suppress(QueueAway):
            await self._announce()

    async def _put_beside(
        self, reward: RewardSettings, wanted: ModelRequest, specs: Sequence[WorkerSpec], expected: str
    ) -> None:
        """Load the new model in workers of its own, prove it, and switch all replicas to them."""
        replicas = self._replicas[reward.name]
        candidates = await _all(map(Candidate.load, specs), _stop)
        try:
            await _all(_prove(reward, expected, candidate) for candidate in candidates)
            if wanted.shadow:
                await self._shadow(reward, wanted, candidates[0])
            await _all(replica.switch(new) for replica, new in zip(replicas, candidates, strict=True))
        except BaseException:
            pairs = zip(replicas, candidates, strict=True)
            await asyncio.gather(*(_stop(new) for replica, new in pairs if replica.spec is not new.spec))
            raise

    async def _put_instead(
        self, reward: RewardSettings, wanted: ModelRequest, specs: Sequence[WorkerSpec], expected: str
    ) -> None:
        """Load the new model in place of the old one, a replica after the other; where one fails, undo the others."""
        changed: list[tuple[Replica, WorkerSpec]] = []
        try:
            for replica, spec in zip(self._replicas[reward.name], specs, strict=True):
                old = replica.spec
                await replica.reload(spec, partial(_prove, reward, expected))
                changed.append((replica, old))
        except BaseException:
            for replica, old in changed:
                with suppress(CannotSwitch, WorkerDied):  # it is as it was, or says in its health what it lacks
                    await replica.reload(old)
            raise

    async def _shadow(self, reward: RewardSettings, wanted: ModelRequest, candidate: Candidate) -> None:
        """Score live traffic by `candidate` as well; raise CannotSwitch above the difference that is allowed."""
        pairs = await self._replicas[reward.name][0].sample(wanted.shadow, SHADOW_S)
        items = [item for item, _ in pairs]
        outcomes = (await candidate.worker.score(items, reward.batch_timeout))[0] if pairs else []
        difference = _difference([outcome for _, outcome in pairs], outcomes)
        self._differences[reward.name] = difference
        limit = wanted.max_difference
        if limit is not None and (difference.mean is None or difference.mean > limit):
            raise CannotSwitch(f"its scores of {difference.items} items differ by {difference.mean} on average.")

    # Processes that share a queue ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Have replicas begin with the models that a shared queue says are wanted, not those of the configuration."""
        for name, replicas in self._replicas.items():
            record = await self._load(name) if replicas else None
            if record is not None and not record["proved"]:
                self._followed.pop(name)  # `run` tries it beside what is configured
            elif record is not None:
                reward = self._rewards[name].model_copy(update={"model_path": record["model"]})
                self._rewards[name] = reward
                for replica, device in zip(replicas, devices_of(reward), strict=True):
                    replica.spec = worker_spec(reward, device, self._settings.limits.silence)
                if record["asleep"]:  # which `run` sees to once it has loaded
                    self._followed.pop(name)

    async def run(self) -> None:
        """Follow what other processes are asked for, until cancelled."""
        while self._backend.persistent:
            await asyncio.sleep(self._settings.limits.silence / 10)
            for name, replicas in self._replicas.items():
                if replicas and not self._locks[name].locked():
                    await self._follow(name)

    async def _follow(self, name: str) -> None:
        async with self._locks[name]:
            before = self._followed.get(name, "")
            record = await self._load(name)
            if record is None or record["id"] == before:
                return
            try:
                if record["model"] != self._rewards[name].model_path:
                    await self._apply(name, ModelRequest(model=record["model"], beside=record["beside"]))
                await _all(r.sleep() if record["asleep"] else r.wake() for r in self._replicas[name])
                if not record["proved"]:
                    await self._backend.save_record(_key(name), {**record, "proved": True}, RECORD_S)
            except (CannotSwitch, RewardRaised, WorkerDied) as error:
                for replica in self._replicas[name]:
                    replica.refusal = str(error)
                logger.error("the model of %s is not changed: %s", name, error)
            except QueueAway:
                self._followed.pop(name)  # the next round says that it is proved

    async def _load(self, name: str) -> dict[str, Any] | None:
        """Return the record of what is wanted of a reward, unless its configuration has changed since."""
        try:
            record = await self._backend.load_record(_key(name)) if self._backend.persistent else None
        except QueueAway:
            return None
        if record is None or record["configured"] != self._configured[name]:
            return None
        self._followed[name] = record["id"]
        return record

    async def _record(self, name: str, wanted: ModelRequest, asleep: bool) -> None:
        if not self._backend.persistent:
            return
        self._followed[name] = uuid.uuid4().hex
        record = {"id": self._followed[name], "model": wanted.model, "beside": wanted.beside, "asleep": asleep}
        record |= {"configured": self._configured[name], "proved": bool(self._replicas[name])}
        await self._backend.save_record(_key(name), record, RECORD_S)


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


def _is_repository(model: str) -> bool:
    """Return whether a name can only be a repository's: one of a folder, such as org/../../etc, would be opened."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return not Path(model).exists()


def devices_of(reward: RewardSettings) -> list[str]:
    """Return the device of each of a reward's replicas."""
    devices = reward.devices or [reward.device]
    return [devices[number % len(devices)] for number in range(reward.replicas)]


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


def _difference(old: Sequence[Outcome], new: Sequence[Outcome]) -> Difference:
    """Return how far `new` scores are from `old` ones, of the items that have both."""
    both = np.array([_scores(old), _scores(new)])
    both = both[:, np.isfinite(both).all(axis=0)] if len(new) else np.empty((2, 0))
    if not both.size:
        return Difference(items=0, mean=None, largest=None, correlation=None)
    distance = np.abs(both[0] - both[1])
    varies = both.shape[1] > 1 and (both.std(axis=1) > 0).all()
    correlation = float(np.corrcoef(both[0], both[1]).item(1)) if varies else None
    return Difference(
        items=both.shape[1], mean=float(distance.mean()), largest=float(distance.max()), correlation=correlation
    )


def _key(name: str) -> str:
    return f"model:{name}"
