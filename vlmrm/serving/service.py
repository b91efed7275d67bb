"""The core: rewards with their workers, jobs that are accepted or refused, results that requests wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from anyio import move_on_after
from cachetools import LRUCache
from prometheus_client import generate_latest

from vlmrm.conversation import Outcome
from vlmrm.errors import RowError
from vlmrm.formats.wire import Item
from vlmrm.serving.backend import EXPIRED, NOT_SERVED, Job, QueueAway, State, Status, repeat
from vlmrm.serving.errors import NotServed, NotServing, RewardFailed, TimedOut
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.replica import Replica, WorkerHealth, WorkerRegistry
from vlmrm.serving.settings import OTHER, DecodeSettings, Limits, RewardSettings, ServiceSettings
from vlmrm.serving.telemetry import Metrics
from vlmrm.serving.versions import Versions
from vlmrm.serving.worker_spec import WorkerSpec, worker_specs

if TYPE_CHECKING:
    from vlmrm.serving.backend import Backend

logger = logging.getLogger("vlmrm")

RETRY_S = 0.02  # between two tries to put a job into a full queue
DECODER = "[decode_args]"  # among the names of rewards in the registry, none of which is called so
WATCHED_S = 2.0  # between two looks at the depth of the queues
STOPPING_S = 10.0  # for workers to end, and to return their jobs to a queue that may be away
WAN = "vlmrm.serving.engines.WanDecoder"
NAME = "decoder"  # in metrics and logs, in place of a reward's name


@dataclass(frozen=True)
class CoreState:
    """The health of rewards and of the decoder of latents, and whether the core stops, fails, or lacks its queue."""

    rewards: dict[str, WorkerHealth]
    decoder: WorkerHealth | None
    draining: bool
    errors: dict[str, str]
    queue: str | None


class Service:
    """The rewards of `settings`, computed here if with `workers`: `start`, `score`, `drain`, `stop`."""

    def __init__(self, settings: ServiceSettings, backend: Backend | None = None, *, workers: bool = True):
        self.settings = settings
        self.metrics = Metrics()
        self.backend: Backend = backend or make_backend(settings)
        self.wait, self.cancel = self.backend.wait, self.backend.cancel
        self.save_record, self.load_record = self.backend.save_record, self.backend.load_record
        self._clients = {client.name for client in settings.callers}
        self.rewards = {reward.name: reward for reward in settings.reward_args}
        decoding, silence = settings.decode_args, settings.limits.silence
        self.decoder = Decoder(decoding, self.metrics, silence) if workers and decoding else None
        self.replicas = {name: self._replicas(reward) if workers else [] for name, reward in self.rewards.items()}
        decoders = {DECODER: [self.decoder.replica]} if self.decoder is not None else {}
        self.registry = WorkerRegistry(self.backend, {**self.replicas, **decoders}, silence)
        self.versions = {
            name: Versions(settings, reward, self.replicas[name], self.registry)
            for name, reward in self.rewards.items()
        }
        self.draining = False
        self.started = time.monotonic()
        self._errors: dict[str, str] = {}  # of loops whose last round has failed
        self._lines: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by reward, of those that wait for room
        self._loops: list[asyncio.Task[None]] = []

    def _replicas(self, reward: RewardSettings) -> list[Replica]:
        specs = worker_specs(reward, self.settings.limits.silence)
        return [Replica(reward.name, spec, self.backend, self.metrics, self.decoder) for spec in specs]

    async def start(self) -> None:
        """Start the workers, without waiting until they have loaded."""
        await self.backend.start()
        moment = self.settings.limits.silence / 10  # so that one lost announcement does no harm
        runs: list[Coroutine[Any, Any, None]] = [
            repeat("saying which workers are ready", self.registry.update, moment, self._errors),
            repeat("counting what waits", self.update_gauges, WATCHED_S, self._errors),
        ]
        groups = [*self.replicas.values(), [self.decoder.replica] if self.decoder is not None else []]
        runs += [self._run(replicas) for replicas in groups if replicas]
        self._loops = [asyncio.create_task(run) for run in runs]

    @property
    def errors(self) -> dict[str, str]:
        """What is wrong with the work of this process that goes on beside requests, by what it is."""
        return {**self._errors, **self.backend.errors}

    def unloadable(self) -> str | None:
        """Return why a reward of this process has never been loaded and never will; None while none is so."""
        replicas = (one for replicas in self.replicas.values() for one in replicas)
        return next((f"{one.error}" for one in replicas if one.lost and not one.model_revision), None)

    async def _run(self, replicas: Sequence[Replica]) -> None:
        """Keep the workers of a reward running; once all are lost, fail its jobs, unless others may load it."""
        runs = [asyncio.create_task(replica.run()) for replica in replicas]
        try:
            await asyncio.wait(runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.wait(runs)
        first = replicas[0]
        if not first.backend.persistent and all(replica.lost for replica in replicas):
            await repeat(f"refusing what asks for {first.reward}", first.fail_waiting, 0, self._errors)

    def health(self, name: str) -> WorkerHealth:
        return self.registry.health(name)

    @property
    def state(self) -> CoreState:
        """What requests are checked against: it is sent to handlers whenever it changes."""
        healths = {name: self.health(name) for name in self.rewards}
        decoder = None if self.settings.decode_args is None else self.health(DECODER)
        return CoreState(healths, decoder, self.draining, self.errors, self.registry.error)

    async def update_gauges(self) -> None:
        """Bring the figures of what waits up to date; while the queue is away, gauges are absent rather than stale."""
        for name, replicas in self.replicas.items():
            self.metrics.ready.labels(name).set(sum(replica.ready for replica in replicas))
        depths: dict[str, tuple[int, int]] = {}
        with suppress(QueueAway):
            for name in self.rewards:
                depths[name] = await self.backend.depth(name)
        # Nothing is awaited from here on, so that no concurrent scrape sees half of the gauges.
        self.metrics.waiting.clear()
        self.metrics.waiting_bytes.clear()
        for name, (jobs, size) in depths.items():
            self.metrics.waiting.labels(name).set(jobs)
            self.metrics.waiting_bytes.labels(name).set(size)
            minute = self.metrics.history.minute(name)
            minute.waiting = max(minute.waiting, jobs)

    async def score(self, job: Job, timeout: float, patience: float, arrived: float) -> tuple[str, Status]:
        """Return the id of a job and its finished status; whoever waits for it and goes has cancelled it.

        With `patience` it waits so many seconds for room in a full queue: of those that wait only the first retries.
        """
        reward = job.reward
        job_id = await self._put(job, time.monotonic() + timeout, patience)
        try:
            status = await self.backend.wait(job_id, timeout)
        except asyncio.CancelledError:
            await self.backend.cancel(job_id)
            raise
        if status is None or not status.finished or status.error == EXPIRED:
            await self.backend.cancel(job_id)
            late = f"was not computed in {timeout:g} s: ask again, with a longer timeout."
            problem = "keeps no result of this any more: ask again." if status is None else late
            self.metrics.record_failure(reward, "timeout", problem, job.request_id)
            raise TimedOut(f"the reward {reward} {problem}")
        if status.error == NOT_SERVED:
            raise self._not_served(reward)
        if status.state is not State.done or status.outcomes is None:
            self.metrics.record_failure(reward, "job", f"{status.error}", job.request_id)
            raise RewardFailed(f"the reward {reward} could not be computed: {status.error}.")
        self.metrics.history.record_request(reward, time.monotonic() - arrived)
        if not self.replicas[reward]:  # this process has no batches that would be counted
            self.metrics.history.minute(reward).items += job.count
        return job_id, status

    async def _put(self, job: Job, deadline: float, patience: float) -> str:
        if patience:
            with move_on_after(patience):
                async with self._lines[job.reward]:
                    while True:
                        with suppress(QueueAway):
                            return await self.put(job, deadline)
                        await asyncio.sleep(RETRY_S)
        try:
            return await self.put(job, deadline)
        except QueueAway as error:
            self.metrics.record_failure(job.reward, "refused", str(error), job.request_id)
            raise

    async def put(self, job: Job, deadline: float | None = None) -> str:
        """Queue a job as of now and return its id; after an error it can be tried again."""
        if self.draining:
            raise NotServing("the service is stopping: ask another, or this one later.")
        job.created, job.deadline = time.time(), deadline
        health = self.health(job.reward)
        if health.unavailable:
            raise NotServing(f"the reward {job.reward} cannot be computed now: see /ready.")
        if not health.revisions:  # this process may have started just now
            with suppress(QueueAway):  # the queue is patient with itself
                await self.registry.refresh()
            health = self.health(job.reward)
        if job.wanted and health.revisions and job.wanted not in health.revisions:
            raise self._not_served(job.reward)
        revisions = [job.wanted] if job.wanted else health.revisions
        job.revisions = revisions if health.info.get("deterministic", True) else ()
        job_id = await self.backend.put(job)
        self.metrics.client_items.labels(job.client if job.client in self._clients else OTHER, job.reward).inc(
            job.count
        )
        return job_id

    async def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what the page shows of these rewards: workers, queue, last hour and recent failures."""
        rewards = []
        for name in names:
            health, (jobs, size) = self.health(name), await self.backend.depth(name)
            rewards.append(
                {"name": name, "ready": health.ready, "workers": health.workers, "jobs": jobs, "bytes": size}
                | {"errors": health.errors, "kind": health.info.get("kind"), "model": health.info.get("model")}
                | {"restarts": health.restarts, "hour": self.metrics.history.hour(name)}
            )
        failures = reversed(self.metrics.recent_failures)
        return {
            "uptime": round(time.monotonic() - self.started),
            "rewards": rewards,
            "failures": [asdict(failure) for failure in failures if failure.reward in names],
        }

    async def measure(self) -> str:
        """Return the metrics in Prometheus's text format."""
        await self.update_gauges()
        return generate_latest(self.metrics.registry).decode()

    async def operate(self, name: str, action: str, model: str = "") -> dict[str, Any]:
        """Change, roll back, sleep or wake the model of a reward, or look at it; return its `ModelState`."""
        versions = self.versions[name]
        if action == "change":
            await versions.change(model)
        elif action == "rollback":
            await versions.roll_back()
        elif action != "look":
            await versions.sleep(action == "sleep")
        return versions.state().model_dump()

    def _not_served(self, reward: str) -> NotServed:
        served = ", ".join(self.health(reward).revisions) or "no revision"
        return NotServed(f"the revision that the request demands is not served: {reward} is served by {served} now.")

    async def drain(self, timeout: float, *, fetched: bool = False) -> None:
        """Refuse new jobs, and wait `timeout` seconds at most until those accepted are finished, or `fetched`."""
        self.draining = True
        # In a shared queue a worker that went on would take jobs for ever.
        for replicas in self.replicas.values():
            for replica in replicas:
                replica.closing = self.backend.persistent
        end = time.monotonic() + timeout
        while time.monotonic() < end and (await self._busy() or (fetched and await self.backend.unfetched())):
            await asyncio.sleep(0.05)
        for name, count in (await self.backend.unfetched()).items() if fetched else ():
            message = (
                "the results of %d requests to %s are lost, as nobody asked in time: a queue in Redis would keep them"
            )
            logger.warning(message, count, name)

    async def _busy(self) -> bool:
        waiting = [] if self.backend.persistent else [(await self.backend.depth(name))[0] for name in self.rewards]
        return any(waiting) or any(replica.busy for replicas in self.replicas.values() for replica in replicas)

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops, timeout=STOPPING_S)
        for versions in self.versions.values():
            await versions.stop()
        await self.registry.unregister()
        await self.backend.stop()


def make_backend(settings: ServiceSettings) -> Backend:
    if not settings.has_redis:
        return MemoryBackend(settings.limits, settings.queue_limits)
    from vlmrm.serving.redis_backend import RedisBackend

    return RedisBackend(settings)


class Decoder:
    """A worker, `replica`, that decodes latents, run and watched as those of rewards are."""

    def __init__(self, settings: DecodeSettings, metrics: Metrics, silence: float):
        spec = WorkerSpec(
            WAN,
            settings.model_dump(include={"model_path", "subfolder", "dtype", "device"}),
            python=settings.venv_python,
            weights=settings.model_path,
            budget=1,
            batch_timeout=settings.timeout,
            silence=silence,
        )
        self._queue = MemoryBackend(Limits(result_ttl=0))  # videos are kept in `_cache` only, which counts bytes
        self.replica = Replica(NAME, spec, self._queue, metrics)
        self._timeout = settings.timeout
        self._cache: LRUCache[str, Outcome] = LRUCache(
            settings.cache_bytes, getsizeof=lambda outcome: len(outcome.extra["video"])
        )

    async def decode(self, items: Sequence[Item]) -> list[tuple[Item, float] | RowError]:
        """Return each item with `video` in place of `latents`, and the seconds that it took, or its error."""
        return await asyncio.gather(*map(self._decode, items))

    async def _decode(self, item: Item) -> tuple[Item, float] | RowError:
        if "latents" not in item:
            return item, 0.0
        try:
            outcome = await self._video({"latents": item["latents"]["npy"]})
        except RowError as error:
            return error
        columns = {name: value for name, value in item.items() if name != "latents"}
        decoded: Any = {**columns, "video": {"npy": outcome.extra["video"]}}
        return decoded, outcome.score or 0.0

    async def _video(self, item: Item) -> Outcome:
        job = Job.of(NAME, [item])
        key = f"{self.replica.revision} {job.key}"
        if key in self._cache:
            return self._cache[key]
        job_id = await self._queue.put(job)
        # A worker that cannot be loaded may come back for the next request, but this one is not kept waiting.
        while True:
            status = await self._queue.wait(job_id, self._timeout)
            assert status is not None  # it was put
            if not status.outcomes and self.replica.error is not None and not self.replica.ready:
                await self._queue.cancel(job_id)
                raise RowError("its latents cannot be decoded: the decoder cannot be loaded")
            if status.finished:
                break
        if status.state is not State.done or not status.outcomes:
            raise RowError(f"its latents cannot be decoded: {status.error}")
        [outcome] = status.outcomes
        if outcome.error is not None:
            raise RowError(outcome.error)
        with suppress(ValueError):  # it is larger than the whole cache
            # Not `key`: the decoder may have loaded since, or loaded other weights.
            self._cache[f"{status.revision} {job.key}"] = outcome
        return outcome
