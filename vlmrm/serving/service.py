"""The service: rewards with their workers, jobs that are accepted or refused, results that requests wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from vlmrm.errors import VlmrmError
from vlmrm.formats.wire import Item
from vlmrm.libraries import needs
from vlmrm.serving.backend import Backend, Job, QueueAway, State, Status
from vlmrm.serving.cost import VIDEO_COLUMNS, children, count_pixels, count_prefixes, estimate_tokens
from vlmrm.serving.decoding import Decoder
from vlmrm.serving.event_loop import computed, current_request, in_thread, repeat
from vlmrm.serving.health import WorkerHealth, WorkerRegistry
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.replica import Replica
from vlmrm.serving.settings import RewardSettings, ServiceSettings
from vlmrm.serving.telemetry import REQUEST_ID, Metrics, current_trace
from vlmrm.serving.versions import Versions
from vlmrm.serving.worker_spec import is_trained, worker_specs

logger = logging.getLogger("vlmrm")

DECODER = "[decode_args]"  # among the names of rewards in the registry, none of which is called so
WATCHED_S = 2.0  # between two looks at the depth of the queues
POLL_S = 1.0  # between two looks whether any worker will load what a request waits for
STOPPING_S = 10.0  # for workers to end, and to return their jobs to a queue that may be away


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
    """The rewards of `settings`. Use `start`, then `submit` and `wait`, then `drain` and `stop`.

    Args:
        workers: False leaves computing to other processes that share the queue.
    """

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
            name: Versions(settings, reward, self.replicas[name], self.backend, self.registry.announce)
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
            repeat("counting what waits", self._watch_queues, WATCHED_S, self._errors),
        ]
        for name, replicas in self.replicas.items():
            versions = self.versions[name]
            runs.append(repeat(f"following which model of {name} is wanted", versions.follow, moment, self._errors))
            if replicas:
                runs.append(self._run(replicas, versions.begun))
        if self.decoder is not None:
            runs.append(self._run([self.decoder.replica]))
        self._loops = [asyncio.create_task(run) for run in runs]

    @property
    def errors(self) -> dict[str, str]:
        """What is wrong with the work of this process that goes on beside requests, by what it is."""
        return {**self._errors, **self.backend.errors}

    def unloadable(self) -> str | None:
        """Return why a reward of this process has never been loaded and never will; None while none is so."""
        replicas = (one for replicas in self.replicas.values() for one in replicas)
        return next((f"{one.error}" for one in replicas if one.lost and not one.model_revision), None)

    async def _run(self, replicas: Sequence[Replica], begin: asyncio.Event | None = None) -> None:
        """Keep the workers of a reward running; once all are lost, fail its jobs.

        In a shared queue other processes may load the reward: there `wait` decides.
        """
        if begin is not None:
            await begin.wait()
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

    # Rewards and their health ----------------------------------------------------------------------------------------

    def reward(self, name: str | None) -> RewardSettings:
        """Return the reward of that name; for None the only one."""
        if name is None and len(self.rewards) == 1:
            return next(iter(self.rewards.values()))
        if name not in self.rewards:
            problem = "a request names no reward" if name is None else f"there is no reward {name}"
            raise UnknownReward(f"{problem}: choose from {', '.join(self.rewards)}.")
        return self.rewards[name]

    def health(self, name: str) -> WorkerHealth:
        """Return the health of a reward's workers, in all processes."""
        return self.registry.health(name)

    def decoder_health(self) -> WorkerHealth | None:
        """Return the health of the decoders of latents; None where none is configured."""
        return None if self.settings.decode_args is None else self.health(DECODER)

    def info(self, name: str) -> dict[str, Any]:
        """Return what a worker says about its reward; empty before one has loaded."""
        return self.health(name).info

    async def update_gauges(self) -> None:
        """Bring the gauges up to date; while the queue is away, those of its depth are absent rather than stale."""
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

    async def _watch_queues(self) -> None:
        """Keep how many jobs wait, for the status page."""
        for name in self.rewards:
            with suppress(QueueAway):
                self.metrics.history.record_waiting(name, (await self.backend.depth(name))[0])

    # Jobs ------------------------------------------------------------------------------------------------------------

    async def submit(self, reward: str, items: Sequence[Item]) -> str:
        """Accept items for a reward and return the id of their job; raises as `job` and `accept` do."""
        return await self.accept(await self.job(reward, items))

    async def job(self, reward: str, items: Sequence[Item], priority: int = 0) -> Job:
        """Return items for a reward as a job."""
        self._check_serving(reward)
        max_items, max_bytes = self.settings.queue_limits[reward]
        make = partial(self._make_job, reward, list(items), priority, self.info(reward).get("max_pixels"))
        # Files of the service and images by URL may be large in a small request.
        named = self.settings.media_root is not None or self.settings.allowed_hosts
        job = await (in_thread if named or _has_video(items) else computed)(make)
        if len(items) > max_items or job.size > max_bytes:
            raise TooLarge(
                f"a request of {len(items)} items in {job.size} bytes is over what the queue can hold, "
                f"{max_items} items in {max_bytes} bytes: send fewer at a time."
            )
        return job

    def _make_job(self, reward: str, items: list[Item], priority: int, max_pixels: int | None) -> Job:
        trained = is_trained(self.rewards[reward])  # whose scorer computes equal prompts and media once
        limit = self.settings.limits.max_total_pixels
        pixels = count_pixels(items, once=trained)
        if pixels > limit:
            raise TooLarge(
                f"the images and frames of a request are {pixels} pixels, over the limit max_total_pixels of {limit}: "
                "send fewer at a time, or smaller ones."
            )
        cost, prefixes = count_prefixes(items, max_pixels) if trained else (estimate_tokens(items, max_pixels), {})
        job = Job(reward, items, cost=cost, prefixes=prefixes, priority=priority)
        request = current_request()
        job.client, job.wanted = request.client, request.wanted
        job.request_id, job.trace = REQUEST_ID.get() or "", current_trace()
        _ = job.key  # computed in the thread, as many bytes take long to hash
        return job

    async def accept(self, job: Job, deadline: float | None = None) -> str:
        """Queue a job as of now and return its id; after an error it can be tried again.

        While no worker is ready, the revision that will be served is unknown: no earlier result is reused.
        """
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
        return await self.backend.put(job)

    def not_served(self, reward: str) -> NotServed:
        """Return the error of a request that demands another revision than those that are served."""
        served = ", ".join(self.health(reward).revisions) or "no revision"
        return NotServed(f"the revision that the request demands is not served: {reward} is served by {served} now.")

    def _check_serving(self, reward: str) -> None:
        if self.draining:
            raise NotServing("the service is stopping: ask another, or this one later.")
        if self.health(reward).unavailable:
            raise NotServing(f"the reward {reward} cannot be computed now: see /ready.")

    async def wait(self, reward: str, job_id: str, timeout: float) -> Status | None:
        """Return the status once the job is finished, or as it is after `timeout` seconds; None for an unknown job.

        A job whose reward no worker in any process will load has failed.
        """
        if not self.backend.persistent:
            return await self.backend.wait(job_id, timeout)
        # Workers of other processes may be lost while this request waits: the health of all is looked at meanwhile.
        waiting = asyncio.ensure_future(self.backend.wait(job_id, timeout))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=POLL_S)
                health = self.health(reward)
                if waiting.done() or not health.workers or health.lost < health.workers:
                    continue
                with suppress(QueueAway):
                    status = await self.backend.status(job_id)
                    if status is not None and status.state is State.queued:
                        await self.backend.cancel(job_id)
                        return Status(State.failed, error="; ".join(health.errors).rstrip("."))
            return waiting.result()
        finally:
            waiting.cancel()

    # Shutdown --------------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float, *, fetched: bool = False) -> None:
        """Refuse new jobs, and wait `timeout` seconds at most until the accepted ones are finished.

        In a shared queue other processes finish what waits: there only what runs in this process is waited for.

        Args:
            fetched: also wait until requests have got the results that end with this process.
        """
        self.draining = True
        # In a shared queue a worker that went on would take jobs for ever.
        for replicas in self.replicas.values():
            for replica in replicas:
                replica.closing = self.backend.persistent
        end = time.monotonic() + timeout
        while time.monotonic() < end and (await self._busy() or (fetched and await self.backend.unfetched())):
            await asyncio.sleep(0.05)
        for name, count in (await self.backend.unfetched()).items() if fetched else ():
            logger.warning(
                "the results of %d requests to %s are lost, as nobody has asked for them in time: a queue in Redis "
                "would keep them",
                count,
                name,
            )

    async def _busy(self) -> bool:
        waiting = [] if self.backend.persistent else [(await self.backend.depth(name))[0] for name in self.rewards]
        return any(waiting) or any(replica.busy for replicas in self.replicas.values() for replica in replicas)

    async def stop(self) -> None:
        """End the workers."""
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops, timeout=STOPPING_S)
        for versions in self.versions.values():
            await versions.stop()
        await self.registry.unregister()
        await self.backend.stop()


def make_backend(settings: ServiceSettings) -> Backend:
    """Return the queue of the settings: in Redis, or in this process."""
    if not settings.has_redis:
        return MemoryBackend(settings.limits, settings.queue_limits)
    from vlmrm.serving.redis_backend import RedisBackend
    from vlmrm.serving.redis_connection import RedisConnection

    return RedisBackend(RedisConnection.of(settings), settings.limits, settings.queue_limits)


def _has_video(item: Any) -> bool:
    """Return whether an item has a video: counting its packets takes long."""
    if isinstance(item, dict) and any(item.get(name) is not None for name in VIDEO_COLUMNS):
        return True
    return any(map(_has_video, children(item)))
