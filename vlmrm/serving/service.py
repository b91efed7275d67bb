"""The service: rewards with their workers, jobs that are accepted or refused, results that requests wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cachetools import LRUCache
from opentelemetry import propagate

from vlmrm.conversation import Outcome
from vlmrm.errors import RowError, VlmrmError
from vlmrm.formats.wire import Item
from vlmrm.libraries import needs
from vlmrm.serving.backend import Backend, Job, QueueAway, State
from vlmrm.serving.event_loop import computed, current_request, in_thread, repeat
from vlmrm.serving.media import DECODED_PIXELS, SLOW_PIXELS, count_pixels, count_prefixes, estimate_tokens, has_video
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.replica import Replica, WorkerHealth, WorkerRegistry
from vlmrm.serving.settings import DecodeSettings, Limits, RewardSettings, ServiceSettings
from vlmrm.serving.telemetry import REQUEST_ID, Metrics
from vlmrm.serving.versions import Versions
from vlmrm.serving.worker_spec import WorkerSpec, is_trained, worker_specs

logger = logging.getLogger("vlmrm")

DECODER = "[decode_args]"  # among the names of rewards in the registry, none of which is called so
WATCHED_S = 2.0  # between two looks at the depth of the queues
STOPPING_S = 10.0  # for workers to end, and to return their jobs to a queue that may be away
WAN = "vlmrm.serving.engines.WanDecoder"
NAME = "decoder"  # in metrics and logs, in place of a reward's name


class UnknownReward(VlmrmError):
    """No reward of that name is served."""


class TooLarge(VlmrmError):
    """A request too large even for an empty queue."""


class NotServing(VlmrmError):
    """The service is stopping, or the reward cannot be loaded; a retry after `retry_after` seconds may succeed."""

    retry_after = 5.0


class NotServed(VlmrmError):
    """The revision that a request demands is not served."""


class Service:
    """The rewards of `settings`, computed here if with `workers`: `start`, `submit` and `wait`, `drain`, `stop`."""

    def __init__(self, settings: ServiceSettings, backend: Backend | None = None, *, workers: bool = True):
        self.settings = settings
        self.metrics = Metrics()
        self.backend: Backend = backend or make_backend(settings)
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
        self._loops: list[asyncio.Task[None]] = []

    def _replicas(self, reward: RewardSettings) -> list[Replica]:
        if reward.ray_address:
            with needs("ray", "workers in a Ray cluster"):
                import ray  # noqa: F401
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

    def reward(self, name: str | None) -> RewardSettings:
        """Return the reward of that name; for None the only one."""
        if name is None and len(self.rewards) == 1:
            return next(iter(self.rewards.values()))
        if name not in self.rewards:
            problem = "a request names no reward" if name is None else f"there is no reward {name}"
            raise UnknownReward(f"{problem}: choose from {', '.join(self.rewards)}.")
        return self.rewards[name]

    def health(self, name: str) -> WorkerHealth:
        return self.registry.health(name)

    def decoder_health(self) -> WorkerHealth | None:
        """Return the health of the decoders of latents; None where none is configured."""
        return None if self.settings.decode_args is None else self.health(DECODER)

    def info(self, name: str) -> dict[str, Any]:
        """Return what a worker says about its reward; empty before one has loaded."""
        return self.health(name).info

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

    async def submit(self, reward: str, items: Sequence[Item]) -> str:
        return await self.accept(await self.job(reward, items))

    async def job(self, reward: str, items: Sequence[Item], priority: int = 0) -> Job:
        """Return items for a reward as a job."""
        self._check_serving(reward)
        max_items, max_bytes = self.settings.queue_limits[reward]
        make = partial(self._make_job, reward, list(items), priority, self.info(reward).get("max_pixels"))
        # Files of the service and images by URL may be large in a small request.
        named = self.settings.media_root is not None or self.settings.allowed_hosts
        job = await (in_thread if named or has_video(items) else computed)(make)
        if len(items) > max_items or job.size > max_bytes:
            most = f"{max_items} items in {max_bytes} bytes"
            sent = f"a request of {len(items)} items in {job.size} bytes"
            raise TooLarge(f"{sent} is over what the queue can hold, {most}: send fewer at a time.")
        return job

    def _make_job(self, reward: str, items: list[Item], priority: int, max_pixels: int | None) -> Job:
        trained = is_trained(self.rewards[reward])  # whose scorer computes equal prompts and media once
        limit = self.settings.limits.max_total_pixels
        pixels, decoded = count_pixels(items, once=trained)
        if pixels > limit:
            what = f"the images and frames of a request are {pixels} pixels"
            raise TooLarge(
                f"{what}, over the limit max_total_pixels of {limit}: send fewer at a time, or smaller ones."
            )
        cost, prefixes = count_prefixes(items, max_pixels) if trained else (estimate_tokens(items, max_pixels), {})
        cost += decoded // DECODED_PIXELS
        job = Job.of(reward, items, cost=cost, prefixes=prefixes, priority=priority, slow=decoded > SLOW_PIXELS)
        request = current_request()
        job.client, job.weight, job.wanted = request.client.name, request.client.weight, request.wanted
        job.request_id, carrier = REQUEST_ID.get() or "", dict[str, str]()
        propagate.inject(carrier)
        job.trace = carrier.get("traceparent", "")
        _ = job.key  # computed in the thread, as many bytes take long to hash
        return job

    async def accept(self, job: Job, deadline: float | None = None) -> str:
        """Queue a job as of now and return its id; after an error it can be tried again."""
        self._check_serving(job.reward)
        job.created, job.deadline = time.time(), deadline
        if not self.health(job.reward).revisions:  # this process may have started just now
            with suppress(QueueAway):  # `put` below is patient with a queue that is away
                await self.registry.refresh()
        health = self.health(job.reward)
        if job.wanted and health.revisions and job.wanted not in health.revisions:
            raise self.not_served(job.reward)
        revisions = [job.wanted] if job.wanted else health.revisions
        job.revisions = revisions if health.info.get("deterministic", True) else ()
        job_id = await self.backend.put(job)
        self.metrics.client_items.labels(current_request().client.label, job.reward).inc(job.count)
        return job_id

    def not_served(self, reward: str) -> NotServed:
        """Return the error of a request that demands another revision than those that are served."""
        served = ", ".join(self.health(reward).revisions) or "no revision"
        return NotServed(f"the revision that the request demands is not served: {reward} is served by {served} now.")

    def _check_serving(self, reward: str) -> None:
        if self.draining:
            raise NotServing("the service is stopping: ask another, or this one later.")
        if self.health(reward).unavailable:
            raise NotServing(f"the reward {reward} cannot be computed now: see /ready.")

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
