"""Keep the queue and the results in Redis, shared by any number of API processes and worker hosts."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio as redis
from anyio import move_on_after
from redis import exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import DecorrelatedJitterBackoff, NoBackoff

from vlmrm.conversation import Outcome
from vlmrm.errors import ConfigError
from vlmrm.formats.wire import read_outcome, write_outcome
from vlmrm.serving import backend
from vlmrm.serving.backend import SLOW, Job, Overloaded, QueueAway, State, Status, has_errors, repeat
from vlmrm.serving.settings import ServiceSettings
from vlmrm.serving.worker.channel import pack, unpack

T = TypeVar("T")

logger = logging.getLogger("vlmrm")

SCRIPT = Path(__file__).with_name("redis_queue.lua").read_text(encoding="utf-8")
CONNECTIONS = 16
PING_S = 5.0  # without a message, after which the connection is tried
SENTINEL_S = 1.0  # in which a sentinel responds, or the next one is asked
REPLICA_MS = 200  # in which a replica has what was accepted, or none is waited for in the next seconds
RESPONSE_S = 10.0  # in which Redis responds, or counts as away
BACKOFF_S = (0.05, 1.0)  # between two tries: the first, the longest
LISTEN_S = 0.5  # between two tries to listen
STOPPING_S = 2.0  # for returning jobs that were taken and not begun
PATIENCE_S = 3.0  # that a request waits for a Redis that is away before it is refused
POLL_S = 5.0  # between two looks at the queue, in case a message was lost


class IsCluster(redis.ConnectionError):
    """The address is of a Redis Cluster, on which a script cannot reach all keys."""


# Errors that pass: the disk is full, a replica takes over, an administrator is not done yet.
TRANSIENT = ("MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS")
REASONS: dict[type[Exception], str] = {
    exceptions.AuthenticationError: "it refuses the password",
    exceptions.NoPermissionError: "it permits too little",
    exceptions.OutOfMemoryError: "its memory is full",
    exceptions.ReadOnlyError: "it is read only",
    MasterNotFoundError: "its sentinels name no master",
    IsCluster: "it is a Redis Cluster, which the queue cannot use: give one Redis, or Sentinel",
}


class RedisBackend:
    """`MemoryBackend` of several processes; `redis_queue.lua` has the keys. While Redis is away, results are held."""

    persistent = True

    def __init__(self, settings: ServiceSettings):
        self._limits, self._capacity = settings.limits, settings.queue_limits
        self.errors: dict[str, str] = {}
        self._silence = settings.limits.silence
        self._client, self._prefix = _client(settings), settings.redis_prefix  # of every key and channel
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._replicated = bool(settings.redis_sentinels)  # a replica may take over: it must have what was accepted
        self._no_replica = -math.inf  # when none had what was written
        self._last_failure = time.monotonic()  # the start counts as one: this process has heard nothing yet
        self._script = self._client.register_script(SCRIPT)
        self._is_cluster = False
        self._ttl = _milliseconds(settings.limits.result_ttl)
        # Of jobs that are given back.
        self._ending = (backend.MAX_ATTEMPTS, backend.GIVEN_UP, backend.CANCELLED, self._ttl)
        self._held: dict[str, str] = {}  # jobs that this process took and has not finished, by receipt
        self._queued: dict[str, asyncio.Event] = {}  # by queue
        self._finished: dict[str, set[asyncio.Event]] = defaultdict(set)  # by job, an event for each waiting request
        self._queues: set[str] = set()  # that workers of this process take from
        self._loops: list[asyncio.Task[None]] = []
        self._takes: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        claiming = repeat("claiming what its workers compute", self._renew, self._silence / 4, self.errors)
        self._loops = [asyncio.create_task(self._listen()), asyncio.create_task(claiming)]

    async def stop(self) -> None:
        if self._takes:  # jobs that were taken and not begun are returned
            await asyncio.wait(self._takes, timeout=STOPPING_S)
        running = {*self._loops, *self._takes}
        while running:  # redis-py may swallow a cancellation while it connects
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        await self._client.aclose()

    async def _run(self, operation: str, *arguments: str | bytes | float, patience: float | None) -> Any:
        """Run an operation of the script; each may safely run twice where a response is lost."""
        return await self._retry(lambda: self._script([self._prefix], [operation, *arguments]), patience)

    async def _put_in_two(self, arguments: Sequence[str | bytes | float]) -> Any:
        """Put a job, and wait until a replica has it, unless there is none."""
        async with self._client.pipeline(transaction=False) as both:
            await self._script([self._prefix], ["put", *arguments], client=both)
            both.wait(1, REPLICA_MS)  # for what this connection has written
            reply, replicas = await both.execute()
        if not replicas and time.monotonic() - self._no_replica > PING_S:
            self._no_replica = time.monotonic()
            logger.warning("no replica of Redis follows: a fail-over now loses what was accepted since")
        return reply

    async def _retry(self, call: Callable[[], Awaitable[T]], patience: float | None) -> T:
        """Return the result of `call`, which is tried again while Redis is away."""
        end = math.inf if patience is None else time.monotonic() + patience

        async def attempt() -> T:
            if self._is_cluster:
                raise IsCluster
            async with self._free:
                return await call()

        async def failed(error: Exception) -> None:
            self._last_failure = time.monotonic()
            if self._last_failure >= end:
                raise QueueAway(f"the queue cannot be reached ({_reason(error)}): try again later.") from error

        first, longest = BACKOFF_S
        errors: Any = (exceptions.RedisError, OSError)
        # The exponential ones of redis-py overflow after 1,024 tries, half an hour.
        retry = Retry(DecorrelatedJitterBackoff(longest, first), -1, errors)
        return await retry.call_with_retry(attempt, failed, is_retryable=_is_transient)

    async def _listen(self) -> None:
        """Wake what waits for messages, and after each connection everything: while there was none, they were lost."""
        logged = ""
        while True:
            try:
                async with self._client.pubsub() as messages:
                    await messages.subscribe(f"{self._prefix}:come", f"{self._prefix}:over")
                    await self._check()
                    logger.info("connected to Redis")
                    logged = ""
                    for name in list(self._queued):
                        self._on_message("come", name)
                    for name in list(self._finished):
                        self._on_message("over", name)
                    while True:
                        message = await messages.get_message(ignore_subscribe_messages=True, timeout=PING_S)
                        if message is None:
                            await messages.ping()
                        elif message["type"] == "message":
                            channel = message["channel"].decode().removeprefix(f"{self._prefix}:")
                            self._on_message(channel, message["data"].decode())
            except Exception as error:
                known = _is_transient(error)
                reason = _reason(error) if known else f"{type(error).__name__}, a fault of the service"
                self._last_failure = time.monotonic()
                if logged != reason:
                    logged, fault = reason, None if known else error
                    logger.error("Redis cannot be used (%s): the service retries until it can", reason, exc_info=fault)
            await asyncio.sleep(LISTEN_S)

    async def _check(self) -> None:
        """Refuse a cluster, and warn of a Redis whose settings may lose accepted jobs."""
        info = await self._client.info("persistence", "memory", "server")
        self._is_cluster = info.get("redis_mode") == "cluster"
        if self._is_cluster:
            raise IsCluster
        if not info.get("aof_enabled"):
            logger.warning("Redis keeps no append-only file: what waits is lost with it; set appendonly yes.")
        if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
            logger.warning("Redis drops keys when its memory is full: set maxmemory-policy noeviction.")

    def _on_message(self, channel: str, name: str) -> None:
        """Wake what waits for a job in the queue `name`, or for the end of the job `name`."""
        queued = self._queued.pop(name, None) if channel == "come" else None
        for event in [queued] if queued is not None else self._finished.get(name, ()):
            event.set()

    async def put(self, job: Job) -> str:
        ttl = "" if job.deadline is None else job.deadline - time.monotonic()  # Redis counts by its own clock
        content = (job.id, job.key, job.reward, job.packed, job.count, job.cost, job.priority, ttl)
        origin = (" ".join(job.revisions), json.dumps(list(job.prefixes.items())), job.client)
        origin = (*origin, job.request_id, job.wanted, SLOW if job.slow else "", job.weight)
        bounds = (*self._capacity, self._limits.queue_bytes)
        arguments = (*content, *bounds, self._ttl, *origin)
        if self._replicated and time.monotonic() - self._no_replica >= PING_S:
            accepted, *reply = await self._retry(lambda: self._put_in_two(arguments), PATIENCE_S)
        else:
            accepted, *reply = await self._run("put", *arguments, patience=PATIENCE_S)
        if not accepted:
            raise Overloaded(job.reward, *reply)
        return reply[0].decode()

    async def status(self, job_id: str) -> Status | None:
        names = ("state", "outcomes", "error", "seconds", "revision")
        state, outcomes, error, seconds, revision = await self._fields(f"job:{job_id}", *names)
        if state is None:
            return None
        return Status(
            State(state.decode()),
            None if outcomes is None else list(map(read_outcome, unpack(outcomes))),
            None if error is None else error.decode(),
            None if seconds is None else float(seconds),
            None if revision is None else revision.decode(),
        )

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        end = time.monotonic() + timeout
        finished = asyncio.Event()
        self._finished[job_id].add(finished)
        try:
            while True:
                finished.clear()
                remaining = end - time.monotonic()
                try:
                    status = await self.status(job_id)
                except QueueAway:
                    if remaining <= 0:
                        raise
                    continue  # the job goes on without this process
                if status is None or status.finished or remaining <= 0:
                    return status
                with move_on_after(min(remaining, POLL_S)):
                    await finished.wait()
        finally:
            self._finished[job_id].discard(finished)
            if not self._finished[job_id]:
                del self._finished[job_id]

    async def cancel(self, job_id: str) -> bool:
        arguments = (job_id, uuid.uuid4().hex, backend.CANCELLED, self._ttl)
        return bool(await self._run("cancel", *arguments, patience=PATIENCE_S))

    async def unfetched(self) -> Mapping[str, int]:
        return {}  # any other process can return what is in Redis

    async def depth(self, reward: str) -> tuple[int, int]:
        jobs, size = await self._fields("waiting", f"jobs:{reward}", f"bytes:{reward}")
        return int(jobs or 0), int(size or 0)

    async def _fields(self, key: str, *names: str) -> Any:
        client, key = self._client, f"{self._prefix}:{key}"
        return await self._retry(lambda: client.hmget(key, list(names)), PATIENCE_S)

    async def take(self, queue: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        self._queues.add(queue)
        while True:
            queued = self._queued.setdefault(queue, asyncio.Event())  # a new one after each message
            taking = self._spawn(self._take(queue, budget, cached))
            try:
                if jobs := await asyncio.shield(taking):
                    return jobs
            except asyncio.CancelledError:
                # Redis may have handed out jobs already: the script runs to its end, and they are returned.
                self._spawn(self._undo(taking))
                raise
            with move_on_after(POLL_S):
                await queued.wait()

    async def _take(self, queue: str, budget: int, cached: Collection[str]) -> list[Job]:
        token = uuid.uuid4().hex  # with which a retry gets what the first try has taken
        reward = queue.removesuffix(SLOW)
        arguments = (queue, budget, token, self._ttl, backend.EXPIRED, backend.AGING_S, json.dumps(list(cached)))
        jobs = []
        for reply in await self._run("take", *arguments, patience=None):
            job_id, receipt, packed, count, cost, priority, attempts, created, *origin = reply
            prefixes, client, request_id, wanted = (text.decode() for text in origin)
            content = (packed, int(count), int(cost), dict(json.loads(prefixes)), int(priority), client)
            job = Job(reward, *content, request_id, wanted, slow=queue != reward, attempts=int(attempts))
            job.id, job.created, job.receipt = job_id.decode(), float(created), receipt.decode()
            self._held[job.receipt] = job.id
            jobs.append(job)
        return jobs

    async def _undo(self, taking: asyncio.Task[list[Job]]) -> None:
        await self.requeue(await taking, None)

    async def finish(self, job: Job, outcomes: Sequence[Outcome], seconds: float, revision: str) -> None:
        shared = "" if has_errors(outcomes) else revision
        packed = pack(list(map(write_outcome, outcomes)))
        await self._release("finish", job, packed, seconds, revision, shared, self._ttl)

    async def fail(self, job: Job, error: str) -> None:
        await self._release("fail", job, job.receipt, error, self._ttl)

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        for job in jobs:
            await self._release("give_back", job, job.receipt, blame or "", *self._ending)

    async def _release(self, operation: str, job: Job, *arguments: str | bytes | float) -> None:
        try:
            await self._run(operation, job.id, *arguments, patience=None)
        finally:  # were it refused, others would have the job once its claim is over
            self._held.pop(job.receipt, None)

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        await self._run("keep", name, json.dumps(record), _milliseconds(ttl), patience=PATIENCE_S)

    async def load_record(self, name: str) -> dict[str, Any] | None:
        record = await self._run("kept", name, patience=PATIENCE_S)
        return None if record is None else json.loads(record)

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        await self._run("announce", process, json.dumps(health), ttl, patience=0)

    async def announcements(self) -> dict[str, dict[str, Any]]:
        flat = await self._run("announced", patience=0)
        return {process.decode(): json.loads(health) for process, health in zip(flat[::2], flat[1::2], strict=True)}

    async def _renew(self) -> None:
        """Renew the claims of this process on its jobs, and queue again those of processes that are silent."""
        for receipt, job_id in list(self._held.items()):
            await self._run("renew", job_id, receipt, patience=None)
        # After an outage of Redis all processes seem silent: they are given time to come back.
        if time.monotonic() - self._last_failure < self._silence:
            return
        blame = f"the host of its worker was silent for {self._silence:g} s"
        for queue in list(self._queues):
            with suppress(QueueAway):  # until the next round
                await self._run("reclaim", queue, self._silence, blame, *self._ending, patience=0)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._takes.add(task)
        task.add_done_callback(self._takes.discard)
        return task


def _milliseconds(ttl: float) -> int:
    return max(1000, round(1000 * ttl))  # at least a second, in which waiting requests read the result


def _client(settings: ServiceSettings) -> redis.Redis:
    """Return a client of the Redis of the settings, which need not be up yet, or of its sentinels' master."""
    # `_retry` knows for how long.
    times: dict[str, Any] = {"socket_timeout": SENTINEL_S, "socket_connect_timeout": SENTINEL_S}
    times["retry"] = Retry(NoBackoff(), 0)
    options: dict[str, Any] = {**times, "socket_timeout": RESPONSE_S, "socket_connect_timeout": RESPONSE_S}
    options |= {"socket_keepalive": True, "password": settings.redis_password.get_secret_value() or None}
    url, sentinels = settings.redis_url.get_secret_value(), settings.redis_sentinels
    try:
        options |= parse_url(url) if url else {"host": settings.redis_host, "port": settings.redis_port}
        if sentinels:
            sentinel = Sentinel([])
            sentinel.sentinels = [redis.Redis.from_url(one.get_secret_value(), **times) for one in sentinels]
            options["ssl"] = options.pop("connection_class", None) is not None
            client = sentinel.master_for(options.pop("host"), **options)
        else:
            client = redis.Redis.from_pool(redis.ConnectionPool(**options))
        client.connection_pool.make_connection()  # which connects to nothing yet
    except (ValueError, KeyError, TypeError):  # whose message may hold the password
        raise ConfigError(
            "redis_url or redis_sentinels has what redis-py cannot read: give redis://USER:PASSWORD@HOST:PORT, or "
            "rediss:// for TLS, with options of redis-py as ?NAME=VALUE."
        ) from None
    return client


def _is_transient(error: Exception) -> bool:
    if isinstance(error, exceptions.ResponseError):
        return isinstance(error, tuple(REASONS)) or str(error).startswith(TRANSIENT)
    return isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError))


def _reason(error: Exception) -> str:
    """Return the reason without the address of Redis, which is not the clients' business."""
    if type(error) in REASONS:
        return REASONS[type(error)]
    if isinstance(error, exceptions.ResponseError):
        return f"it answers {str(error).split()[0]}"
    return "it does not answer"
