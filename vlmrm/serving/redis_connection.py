"""The connection to Redis: retried while it is away, found by its sentinels, refused where it is a cluster."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio as redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import DecorrelatedJitterBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from vlmrm.errors import ConfigError
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
BACKOFF_S = (0.05, 1.0)  # between two tries: the first, the longest
LISTEN_S = 0.5  # between two tries to listen


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


class RedisConnection:
    """The script `redis_queue.lua` in one Redis (6.2 or newer, with replicas or without), and its messages.

    While Redis is away, calls are retried, and `listen` tells when it is back.

    Args:
        prefix: begins every key and channel.
        replicated: whether a replica may take over, so that it must have what was accepted.
    """

    def __init__(self, client: redis.Redis, prefix: str, *, replicated: bool = False):
        self.client, self.prefix, self.replicated = client, prefix, replicated
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._no_replica = -math.inf  # when none had what was written
        self.last_failure = time.monotonic()  # the start counts as one: this process has heard nothing yet
        self._script = client.register_script(SCRIPT)
        self._is_cluster = False

    @classmethod
    def of(cls, settings: ServiceSettings) -> RedisConnection:
        """Return a connection to the Redis of the settings, or to the master that its sentinels name.

        It need not be up yet.
        """
        # `retry` below knows for how long.
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
        return cls(client, settings.redis_prefix, replicated=bool(sentinels))

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
        end = math.inf if patience is None else time.monotonic() + patience

        async def attempt() -> T:
            if self._is_cluster:
                raise IsCluster
            async with self._free:
                return await call()

        async def failed(error: Exception) -> None:
            self.last_failure = time.monotonic()
            if self.last_failure >= end:
                raise QueueAway(f"the queue cannot be reached ({_reason(error)}): try again later.") from error

        first, longest = BACKOFF_S
        errors: Any = (RedisError, OSError)
        # The exponential ones of redis-py overflow after 1,024 tries, half an hour.
        retry = Retry(DecorrelatedJitterBackoff(longest, first), -1, errors)
        return await retry.call_with_retry(attempt, failed, is_retryable=_is_transient)

    async def listen(
        self, on_message: Callable[[str, str], None], on_connect: Callable[[], None], *channels: str
    ) -> None:
        """Call `on_message` with the channel and text of each message, and `on_connect` after each connection.

        Messages that were sent while there was no connection are lost. No error ends it.
        """
        logged = ""

        def connected() -> None:
            nonlocal logged
            logger.info("connected to Redis")
            logged = ""
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
            await asyncio.sleep(LISTEN_S)

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
