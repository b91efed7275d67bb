"""Versions of a reward's model: another is loaded beside it, put in its place, and rolled back, under load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import Field

from vlmrm.serving.backend import QueueAway
from vlmrm.serving.errors import CannotSwitch
from vlmrm.serving.replica import Replica, WorkerRegistry
from vlmrm.serving.settings import RewardSettings, ServiceSettings
from vlmrm.serving.worker_process import WorkerDied, WorkerProcess
from vlmrm.serving.worker_spec import worker_specs
from vlmrm.settings import Strict

T = TypeVar("T")

logger = logging.getLogger("vlmrm")


class ModelRequest(Strict):
    """A model that shall compute a reward from now on."""

    model: str = Field(min_length=1, description="A folder below one of model_roots, or a repository they allow.")


class ModelState(Strict):
    """The model that computes a reward in this process, the one before, and what all its workers have of it."""

    reward: str
    model: str
    revisions: list[str] = Field(description="Of the workers that are ready; several while it changes.")
    previous: str | None = Field(None, description="That a rollback puts in place again.")
    changing: bool = False
    asleep: bool = False
    error: str | None = Field(None, description="What is wrong with workers.")


class Versions:
    """The versions of a reward's model in this process; what is begun goes on where its caller is cancelled."""

    def __init__(
        self, settings: ServiceSettings, reward: RewardSettings, replicas: Sequence[Replica], registry: WorkerRegistry
    ):
        self._settings, self._reward, self._replicas, self._registry = settings, reward, replicas, registry
        self._name = reward.name
        self._model = reward.model_path
        self._previous = ("", "")  # the model before, and the revision as which it was served
        self._changing = False
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def state(self) -> ModelState:
        health = self._registry.health(self._name)
        return ModelState(
            reward=self._name,
            model=self._model,
            revisions=health.revisions,
            previous=self._previous[0] or None,
            changing=self._changing,
            asleep=health.asleep > 0,
            error="; ".join(health.errors) or None,
        )

    async def change(self, model: str, expected: str = "") -> None:
        """Have `model` compute the reward, as the revision `expected`, or as any."""
        self._check_allowed(model)
        if self._changing:
            raise CannotSwitch(f"the model of {self._name} is being changed: try again once it is done.")
        self._changing = True
        await self._to_its_end(self._change(model, expected))

    async def roll_back(self) -> None:
        """Have the previous model compute the reward again, if its files are as they were."""
        if not self._previous[0]:
            raise CannotSwitch(f"{self._name} has had no other model.")
        await self.change(*self._previous)

    async def sleep(self, asleep: bool) -> None:
        """Free the accelerator's memory of the reward's workers, or fill it again."""
        if not self._replicas:
            raise CannotSwitch(f"{self._name} has no workers in this process: ask one that has.")
        await self._to_its_end(self._sleep(asleep))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def _check_allowed(self, model: str) -> None:
        """Raise CannotSwitch unless a model is the configured one, or the operator allows it."""
        configured = self._reward.model_path
        if not configured or not self._replicas:
            reason = "no workers in this process: ask one that has" if configured else "no model_path"
            raise CannotSwitch(f"{self._name} has {reason}: its model cannot be changed.")
        if model in (configured, self._model):
            return
        path = Path(model)
        for root in self._settings.model_roots:
            folder = Path(root)
            if folder.is_absolute() and path.is_absolute():
                if path.is_dir() and path.resolve().is_relative_to(folder.resolve()):
                    return
            elif not folder.is_absolute() and fnmatch(model, root) and is_repository(model):
                return
        raise CannotSwitch(f"the model {path.name} is no folder below model_roots, and no repository that they allow.")

    async def _sleep(self, asleep: bool) -> None:
        async with self._lock:
            try:
                await _all(replica.sleep(asleep) for replica in self._replicas)
            except WorkerDied as error:
                raise CannotSwitch(f"the worker of {self._name} {error}") from error
            with suppress(QueueAway):
                await self._registry.announce()

    async def _change(self, model: str, expected: str) -> None:
        """Load the model in workers of its own, and switch all replicas to them."""
        name, loaded = Path(model).name, list[WorkerProcess]()
        reward = self._reward.model_copy(update={"model_path": model})
        try:
            async with self._lock:
                for replica in self._replicas:
                    if replica.lost:
                        raise CannotSwitch(f"its place cannot be taken: {replica.error}")
                served = self._replicas[0].model_revision
                await _all(map(WorkerProcess.start, worker_specs(reward, self._settings.limits.silence)), loaded)
                if any(expected not in ("", worker.revision) for worker in loaded):
                    raise CannotSwitch(f"the files of {name} have changed since it was served.")
                await _all(replica.switch(new) for replica, new in zip(self._replicas, loaded, strict=True))
                # What has never been served is nothing to come back to, nor is what is there again.
                if served and served != self._replicas[0].model_revision:
                    self._previous = (self._model, served)
                self._model = model
                logger.info("%s is computed by the model %s now", self._name, name)
                with suppress(QueueAway):
                    await self._registry.announce()
        except BaseException as error:
            in_use = [replica.spec for replica in self._replicas]
            await asyncio.gather(*(one.stop() for one in loaded if all(one.spec is not it for it in in_use)))
            if isinstance(error, WorkerDied):
                raise CannotSwitch(f"the model {name} is not put in place: it {error}") from error
            raise
        finally:
            self._changing = False


def is_repository(model: str) -> bool:
    """Return whether a name can only be a repository's: one of a folder, such as org/../../etc, would be opened."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return not Path(model).exists()


async def _all(work: Iterable[Awaitable[T]], results: list[T] | None = None) -> None:
    """Do all of it to its end, and raise the first error; `results` has what the others returned."""
    done = await asyncio.gather(*work, return_exceptions=True)
    if results is not None:
        results += [one for one in done if not isinstance(one, BaseException)]
    for one in done:
        if isinstance(one, BaseException):
            raise one
