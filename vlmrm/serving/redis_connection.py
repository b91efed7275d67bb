"""The connection to Redis: retried while it is away, found by its sentinels, refused where it is a cluster."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from vlmrm.libraries import relies_on
from vlmrm.serving.backend import QueueAway
from vlmrm.serving.settings import ServiceSettings

T = TypeVar("T")

logger = logging.getLogger("vlmrm")

SCRIPT = Path(__file__).with_name("redis_queue.lua").read_text(encoding="utf-8")
CONNECTIONS = 16
PING_S = 5.0  # without a message, after which the connection is tried
SENTINEL_S = 1.0  # in which a sentinel responds, or the next one is asked
REPLICA_MS = 200  # in which a replica has what was accepted, or none is waited for in the next seconds
RESPONSE_S = 10.0  # in which Redis responds, or counts as away
BACKOFF_S = (0.05, 2.0)  # between two tries: the first, the longest


class IsCluster(redis.ConnectionError):
    """The address is of a Redis Cluster, on which a script cannot reach all keys."""


# Errors that pass: the disk is full, a replica takes over, an administrator is not done yet.
TRANSIENT = ("MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS")
REASONS: dict[type[Exception], str] = {
    AuthenticationError: "it refuses the password",
    NoPermissionError: "it permits too little",
    OutOfMemoryError: "its memory is full",
    ReadOnlyError: "it is read only",
    MasterNotFoundError: "its sentinels name no master",
    IsCluster: "it is a Redis Cluster, which the queue cannot use: give one Redis, or Sentinel",
}


relies_on(SentinelManagedConnection, attributes=("connection_pool",))


class _Master(NamedTuple):
    """What redis-py's connections ask for the address of a master, without a pool of their kind, which never waits."""

    get_master_address: Callable[[], Awaitable[tuple[str, int]]]
    is_master: bool = True
    check_connection: bool = False


class RedisConnection:
    """The script `redis_queue.lua` in one Redis (6.2 or newer, with replicas or without), and its messages.

    While Redis is away, calls are retried, and `listen` tells when it is back.

    Args:
        prefix: begins every key and channel.
        replicated: whether a replica may take over, so that it must have what was accepted.
    """

    def __init__(self, client: redis.Redis, prefix: str, *, replicated: bool = False):
        self.client, self.prefix, self.replicated = client, prefix, replicated
        self._no_replica = -math.inf  # when none had what was written
        self.last_failure = time.monotonic()  # the start counts as one: this process has heard nothing yet
        self._script = client.register_script(SCRIPT)
        self._is_cluster = False

    @classmethod
    def of(cls, settings: ServiceSettings) -> RedisConnection:
        """Return a connection to the Redis of the settings, or to the master that its sentinels name.

        It need not be up yet.
        """
        shared: dict[str, Any] = {"socket_timeout": RESPONSE_S, "socket_connect_timeout": RESPONSE_S}
        if settings.redis_tls:
            files = {
                "ca_certs": settings.redis_ca,
                "certfile": settings.redis_certificate,
                "keyfile": settings.redis_key,
            }
            shared |= {f"ssl_{name}": str(path) for name, path in files.items() if path is not None}
        if settings.redis_sentinels:
            password = settings.redis_sentinel_password.get_secret_value() or None
            kwargs = {**shared, "password": password, "ssl": settings.redis_tls, "socket_timeout": SENTINEL_S}
            kwargs["socket_connect_timeout"] = SENTINEL_S
            sentinel = Sentinel(settings.sentinel_addresses, sentinel_kwargs=kwargs)
            shared["connection_pool"] = _Master(partial(sentinel.discover_master, settings.redis_master))
            kinds: Any = (SentinelManagedConnection, SentinelManagedSSLConnection)
        else:
            shared |= {"host": settings.redis_host, "port": settings.redis_port}
            kinds = (redis.Connection, redis.SSLConnection)
        pool = redis.BlockingConnectionPool(
            max_connections=CONNECTIONS,
            timeout=None,  # for a free connection
            connection_class=kinds[settings.redis_tls],
            username=settings.redis_user or None,
            password=settings.redis_password.get_secret_value() or None,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # `retry` below knows for how long
            **shared,
        )
        return cls(redis.Redis.from_pool(pool), settings.redis_prefix, replicated=bool(settings.redis_sentinels))

    async def run(self, operation: str, *arguments: str | bytes | float, patience: float | None) -> Any:
        """Run an operation of the script; each may safely run twice where a response is lost."""
        return await self.retry(lambda: self._script([self.prefix], [operation, *arguments]), patience)

    async def accept(self, *arguments: str | bytes | float, patience: float | None) -> Any:
        """Put a job; where a replica may take over, one has the job then, unless none is there."""
        if not self.replicated or time.monotonic() - self._no_replica < PING_S:
            return await self.run("put", *arguments, patience=patience)
        return await self.retry(lambda: self._put_in_two(arguments), patience)

    async def _put_in_two(self, arguments: Sequence[str | bytes | float]) -> Any:
        async with self.client.pipeline(transaction=False) as both:
            await self._script([self.prefix], ["put", *arguments], client=both)
            both.wait(1, REPLICA_MS)  # for what this connection has written
            reply, replicas = await both.execute()
        if not replicas and time.monotonic() - self._no_replica > PING_S:
            self._no_replica = time.monotonic()
            logger.warning("no replica of Redis follows: a fail-over now loses what was accepted since")
        return reply

    async def retry(self, call: Callable[[], Awaitable[T]], patience: float | None) -> T:
        """Return the result of `call`, which is tried again while Redis is away."""
        end = None if patience is None else time.monotonic() + patience
        for pause in backoff():
            try:
                if self._is_cluster:
                    raise IsCluster
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

        Messages that were sent while there was no connection are lost. No error ends it.
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
                reason = _reason(error) if _is_transient(error) else f"{type(error).__name__}, a fault of the service"
                self.last_failure = time.monotonic()
                if logged != reason:
                    logged = reason
                    fault = None if _is_transient(error) else error
                    logger.error("Redis cannot be used (%s): the service retries until it can", reason, exc_info=fault)
            await asyncio.sleep(next(pauses))

    async def _listen(
        self, on_message: Callable[[str, str], None], connected: Callable[[], None], channels: Sequence[str]
    ) -> None:
        async with self.client.pubsub() as messages:
            await messages.subscribe(*(f"{self.prefix}:{name}" for name in channels))
            await self._check()
            connected()
            while True:
                message = await messages.get_message(ignore_subscribe_messages=True, timeout=PING_S)
                if message is None:
                    await messages.ping()
                elif message["type"] == "message":
                    on_message(message["channel"].decode().removeprefix(f"{self.prefix}:"), message["data"].decode())

    async def _check(self) -> None:
        """Refuse a cluster, and warn of a Redis whose settings may lose accepted jobs."""
        info = await self.client.info("persistence", "memory", "server")
        self._is_cluster = info.get("redis_mode") == "cluster"
        if self._is_cluster:
            raise IsCluster
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
