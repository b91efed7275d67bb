"""The queue and the results in Redis, which any number of API processes and worker hosts share."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import read_outcome, write_outcome
from vlmrm.serving.backend import (
    CANCELLED,
    EXPIRED,
    GIVEN_UP,
    MAX_ATTEMPTS,
    Job,
    Overloaded,
    QueueAway,
    State,
    Status,
    has_errors,
    process_name,
)
from vlmrm.serving.settings import Limits, ServiceSettings
from vlmrm.serving.worker.channel import pack, unpack

T = TypeVar("T")

logger = logging.getLogger("vlmrm")

STOPPING_S = 2.0  # for returning jobs that were taken and not begun
PATIENCE_S = 3.0  # that a request waits for a Redis that is away before it is refused
POLL_S = 5.0  # between two looks at the queue, in case a message was lost


class RedisBackend:
    """A `Backend` of several processes; `redis_queue.lua` describes the keys in Redis.

    A job is in Redis before its request is told that it is accepted. While Redis is away, results are held until it
    takes them, and requests are refused with `QueueAway` after `PATIENCE_S`.

    A process without a sign of life for `silence` seconds loses the jobs that it took: they are queued again, which
    counts as an attempt of each, as the death of a worker does.
    """

    persistent = True

    def __init__(self, connection: RedisConnection, limits: Limits):
        self._capacity = (limits.queue_items, limits.queue_bytes)
        self._silence = limits.silence
        self.name = process_name()
        self._connection = connection
        self._ttl = _milliseconds(limits.result_ttl)
        self._held: set[str] = set()  # receipts of jobs that this process took and has not finished
        self._queued: dict[str, asyncio.Event] = {}  # by reward
        self._finished: dict[str, set[asyncio.Event]] = defaultdict(set)  # by job, an event for each waiting request
        self._rewards: set[str] = set()  # that workers of this process compute
        self._loops: list[asyncio.Task[None]] = []
        self._takes: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        loops = (self._connection.listen(self._on_message, self._wake_all, "come", "over"), self._renew())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        for loop in self._loops:
            loop.add_done_callback(_log_failure)

    async def stop(self) -> None:
        if self._takes:  # jobs that were taken and not begun are returned
            await asyncio.wait(self._takes, timeout=STOPPING_S)
        running = {*self._loops, *self._takes}
        while running:  # redis-py may swallow a cancellation while it connects
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        await self._connection.client.aclose()

    # Requests --------------------------------------------------------------------------------------------------------

    async def put(self, job: Job) -> str:
        ttl = "" if job.deadline is None else job.deadline - time.time()  # Redis counts by its own clock
        content = (job.id, job.key, job.reward, job.packed, len(job.items), job.cost, job.priority, ttl)
        origin = (json.dumps(job.prefixes), job.client, job.request_id, job.wanted, job.trace)
        limits = (*self._capacity, self._ttl, " ".join(job.revisions))
        accepted, *reply = await self._connection.run("put", *content, *limits, *origin, patience=PATIENCE_S)
        if not accepted:
            items, size, pace = reply
            raise Overloaded.of(items, size, float(pace))
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
                await _wait_event(finished, min(remaining, POLL_S))
        finally:
            self._finished[job_id].discard(finished)
            if not self._finished[job_id]:
                del self._finished[job_id]

    async def cancel(self, job_id: str) -> bool:
        return bool(await self._connection.run("cancel", job_id, CANCELLED, self._ttl, patience=PATIENCE_S))

    async def count_unfetched(self) -> int:
        return 0  # any other process can return what is in Redis

    async def depth(self, reward: str) -> tuple[int, int]:
        jobs, size = await self._fields("waiting", f"jobs:{reward}", f"bytes:{reward}")
        return int(jobs or 0), int(size or 0)

    async def _fields(self, key: str, *names: str) -> Any:
        client, key = self._connection.client, f"{self._connection.prefix}:{key}"
        return await self._connection.retry(lambda: client.hmget(key, list(names)), PATIENCE_S)

    # Workers ---------------------------------------------------------------------------------------------------------

    async def take(self, reward: str, budget: int, cached: Collection[str] = ()) -> list[Job]:
        self._rewards.add(reward)
        while True:
            queued = self._queued.setdefault(reward, asyncio.Event())  # a new one after each message
            taking = self._spawn(self._take(reward, budget))
            try:
                if jobs := await asyncio.shield(taking):
                    return jobs
            except asyncio.CancelledError:
                # Redis may have handed out jobs already: the script runs to its end, and they are returned.
                self._spawn(self._undo(taking))
                raise
            await _wait_event(queued, POLL_S)

    async def _take(self, reward: str, budget: int) -> list[Job]:
        token = uuid.uuid4().hex  # with which a retry gets what the first try has taken
        arguments = (reward, budget, self.name, token, self._ttl, EXPIRED)
        jobs = []
        for reply in await self._connection.run("take", *arguments, patience=None):
            job_id, stream, entry, packed, cost, priority, attempts, created, *origin = reply
            prefixes, client, request_id, wanted, trace = (text.decode() for text in origin)
            job = Job(
                reward,
                unpack(packed)["items"],
                cost=int(cost),
                prefixes=json.loads(prefixes),
                priority=int(priority),
                client=client,
                request_id=request_id,
                wanted=wanted,
                trace=trace,
                id=job_id.decode(),
                created=float(created),
                attempts=int(attempts),
                packed=packed,
                receipt=f"{stream.decode()} {entry.decode()}",
            )
            self._held.add(job.receipt)
            jobs.append(job)
        return jobs

    async def _undo(self, taking: asyncio.Task[list[Job]]) -> None:
        await self.requeue(await taking, None)

    async def finish(self, job: Job, outcomes: Sequence[Outcome], seconds: float, revision: str) -> None:
        shared = "" if has_errors(outcomes) else revision
        packed = pack(list(map(write_outcome, outcomes)))
        await self._release("finish", job, packed, seconds, revision, shared, self._ttl)

    async def fail(self, job: Job, error: str) -> None:
        await self._release("fail", job, _entry_id(job), error, self._ttl)

    async def requeue(self, jobs: Sequence[Job], blame: str | None) -> None:
        for job in jobs:
            await self._release("give_back", job, _entry_id(job), blame or "", MAX_ATTEMPTS, GIVEN_UP, self._ttl)

    async def _release(self, operation: str, job: Job, *arguments: str | bytes | float) -> None:
        await self._connection.run(operation, job.id, *arguments, patience=None)
        self._held.discard(job.receipt)

    # All processes ---------------------------------------------------------------------------------------------------

    async def save_record(self, name: str, record: dict[str, Any], ttl: float) -> None:
        await self._connection.run("keep", name, json.dumps(record), _milliseconds(ttl), patience=PATIENCE_S)

    async def load_record(self, name: str) -> dict[str, Any] | None:
        record = await self._connection.run("kept", name, patience=PATIENCE_S)
        return None if record is None else json.loads(record)

    async def announce(self, process: str, health: dict[str, Any], ttl: float) -> None:
        await self._connection.run("announce", process, json.dumps(health), ttl, patience=0)

    async def announcements(self) -> dict[str, dict[str, Any]]:
        flat = await self._connection.run("announced", patience=0)
        return {process.decode(): json.loads(health) for process, health in zip(flat[::2], flat[1::2], strict=True)}

    def _on_message(self, channel: str, name: str) -> None:
        """Wake what waits for a job of the reward `name`, or for the end of the job `name`."""
        queued = self._queued.pop(name, None) if channel == "come" else None
        for event in [queued] if queued is not None else self._finished.get(name, ()):
            event.set()

    def _wake_all(self) -> None:
        """Wake everything that waits: messages may have been missed while Redis was away."""
        for reward in list(self._queued):
            self._on_message("come", reward)
        for job_id in list(self._finished):
            self._on_message("over", job_id)

    async def _renew(self) -> None:
        """Renew the claims of this process on its jobs, and queue again those of processes that are silent."""
        while True:
            await asyncio.sleep(self._silence / 4)
            for receipt in list(self._held):
                await self._connection.run("renew", self.name, *receipt.rsplit(" ", 1), patience=None)
            # After an outage of Redis all processes seem silent: they are given time to come back.
            if time.monotonic() - self._connection.last_failure < self._silence:
                continue
            blame = f"the host of its worker was silent for {self._silence:g} s"
            for reward in self._rewards:
                silence = round(1000 * self._silence)
                with suppress(QueueAway):  # until the next round
                    await self._connection.run(
                        *("reclaim", reward, self.name, silence, blame, MAX_ATTEMPTS, GIVEN_UP, self._ttl), patience=0
                    )

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._takes.add(task)
        task.add_done_callback(self._takes.discard)
        return task


def _milliseconds(ttl: float) -> int:
    return max(1000, round(1000 * ttl))  # at least a second, in which waiting requests read the result


def _entry_id(job: Job) -> str:
    return job.receipt.rpartition(" ")[2]


def _log_failure(loop: asyncio.Task[None]) -> None:
    if not loop.cancelled() and (error := loop.exception()) is not None:
        logger.error("the service no longer hears the queue in Redis: %s", error)


async def _wait_event(event: asyncio.Event, seconds: float) -> None:
    # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the event, and a cancelled `take`
    # would take jobs.
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


SCRIPT = Path(__file__).with_name("redis_queue.lua").read_text(encoding="utf-8")
CONNECTIONS = 16
RESPONSE_S = 10.0  # in which Redis responds, or counts as away
BACKOFF_S = (0.05, 2.0)  # between two tries: the first, the longest
# Errors that pass: the disk is full, a replica takes over, an administrator is not done yet.
TRANSIENT = ("MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS")
REASONS: dict[type[Exception], str] = {
    AuthenticationError: "it refuses the password",
    NoPermissionError: "it permits too little",
    OutOfMemoryError: "its memory is full",
    ReadOnlyError: "it is read only",
}


class RedisConnection:
    """The script `redis_queue.lua` in one Redis (6.2 or newer, not a cluster), and its messages.

    While Redis is away, calls are retried, and `listen` tells when it is back.

    Args:
        prefix: begins every key and channel.
    """

    def __init__(self, client: redis.Redis, prefix: str):
        self.client, self.prefix = client, prefix
        self.last_failure = time.monotonic()  # the start counts as one: this process has heard nothing yet
        self._script = client.register_script(SCRIPT)

    @classmethod
    def of(cls, settings: ServiceSettings) -> RedisConnection:
        """Return a connection to the Redis of the settings, which need not be up yet."""
        pool = redis.BlockingConnectionPool(
            max_connections=CONNECTIONS,
            timeout=None,  # for a free connection
            connection_class=redis.SSLConnection if settings.redis_tls else redis.Connection,
            host=settings.redis_host,
            port=settings.redis_port,
            password=settings.redis_password.get_secret_value() or None,
            socket_timeout=RESPONSE_S,
            socket_connect_timeout=RESPONSE_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # `retry` below knows for how long
        )
        return cls(redis.Redis.from_pool(pool), settings.redis_prefix)

    async def run(self, operation: str, *arguments: str | bytes | float, patience: float | None) -> Any:
        """Run an operation of the script; each may safely run twice where a response is lost."""
        return await self.retry(lambda: self._script([self.prefix], [operation, *arguments]), patience)

    async def retry(self, call: Callable[[], Awaitable[T]], patience: float | None) -> T:
        """Return the result of `call`, which is tried again while Redis is away.

        Raises:
            QueueAway: when Redis has been away for `patience` seconds; never with None.
        """
        end = None if patience is None else time.monotonic() + patience
        for pause in backoff():
            try:
                return await call()
            except Exception as error:
                if not _is_transient(error):
                    raise
                self.last_failure = time.monotonic()
                if end is not None and time.monotonic() + pause > end:
                    raise QueueAway(f"the queue cannot be reached ({_reason(error)}): try again later.") from error
            await asyncio.sleep(pause)
        raise AssertionError("the backoff never ends")

    async def listen(
        self, on_message: Callable[[str, str], None], on_connect: Callable[[], None], *channels: str
    ) -> None:
        """Call `on_message` with the channel and text of each message, and `on_connect` after each connection.

        Messages that were sent while there was no connection are lost.
        """
        logged = ""
        pauses = backoff()

        def connected() -> None:
            nonlocal logged, pauses
            logger.info("connected to Redis")
            logged, pauses = "", backoff()
            on_connect()

        while True:
            try:
                await self._listen(on_message, connected, channels)
            except Exception as error:
                if not _is_transient(error):
                    raise
                self.last_failure = time.monotonic()
                if logged != _reason(error):
                    logged = _reason(error)
                    logger.error("Redis cannot be used (%s): the service retries until it can", logged)
            await asyncio.sleep(next(pauses))

    async def _listen(
        self, on_message: Callable[[str, str], None], connected: Callable[[], None], channels: Sequence[str]
    ) -> None:
        async with self.client.pubsub() as messages:
            await messages.subscribe(*(f"{self.prefix}:{name}" for name in channels))
            await self._warn()
            connected()
            while True:
                message = await messages.get_message(ignore_subscribe_messages=True, timeout=POLL_S)
                if message is None:
                    await messages.ping()
                elif message["type"] == "message":
                    on_message(message["channel"].decode().removeprefix(f"{self.prefix}:"), message["data"].decode())

    async def _warn(self) -> None:
        """Warn of a Redis whose settings may lose accepted jobs."""
        info = await self.client.info("persistence", "memory")
        if not info.get("aof_enabled"):
            logger.warning("Redis keeps no append-only file: what waits is lost with it; set appendonly yes.")
        if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
            logger.warning("Redis drops keys when its memory is full: set maxmemory-policy noeviction.")


def backoff() -> Iterator[float]:
    """Yield the seconds to wait before each further try, without end."""
    pause, longest = BACKOFF_S
    while True:
        yield pause * random.uniform(1, 1.5)
        pause = min(2 * pause, longest)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, ResponseError):
        return isinstance(error, tuple(REASONS)) or str(error).startswith(TRANSIENT)
    return isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError))


def _reason(error: Exception) -> str:
    """Return the reason without the address of Redis, which is not the clients' business."""
    if type(error) in REASONS:
        return REASONS[type(error)]
    if isinstance(error, ResponseError):
        return f"it answers {str(error).split()[0]}"
    return "it does not answer"
