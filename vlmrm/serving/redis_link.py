"""A Redis that may be away: what is asked of it is tried again, and who listens hears when it is back."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from vlmrm.serving.backend import QueueAway
from vlmrm.serving.settings import ServiceSettings

logger = logging.getLogger("vlmrm")
T = TypeVar("T")

SCRIPT = Path(__file__).with_name("redis_queue.lua").read_text(encoding="utf-8")
CONNECTIONS = 16
ANSWER_S = 10.0  # in which Redis answers, or counts as away
PAUSES_S = (0.05, 2.0)  # between two tries: at first, at most
LOOK_S = 5.0  # between two looks whether a silent connection still stands
# A disk is full, a replica takes over, an administrator is not done yet.
PASSING = ("MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS")
NAMED: dict[type[Exception], str] = {
    AuthenticationError: "it refuses the password",
    NoPermissionError: "it permits too little",
    OutOfMemoryError: "its memory is full",
    ReadOnlyError: "it is read only",
}


class RedisLink:
    """The script `redis_queue.lua` in one Redis (6.2 or newer, not a cluster), and its messages.

    Args:
        prefix: begins every key and channel.
    """

    def __init__(self, client: redis.Redis, prefix: str):
        self.client, self.prefix = client, prefix
        self.troubled = time.monotonic()  # when it was last away, or this process knew nothing of it yet
        self._script = client.register_script(SCRIPT)

    @classmethod
    def of(cls, settings: ServiceSettings) -> RedisLink:
        """To the Redis that the settings name; it need not be there yet."""
        pool = redis.BlockingConnectionPool(
            max_connections=CONNECTIONS,
            timeout=None,
            connection_class=redis.SSLConnection if settings.redis_tls else redis.Connection,
            host=settings.redis_host,
            port=settings.redis_port,
            password=settings.redis_password.get_secret_value() or None,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # `patiently` tries again, and knows for how long
        )
        return cls(redis.Redis.from_pool(pool), settings.redis_prefix)

    async def run(self, operation: str, *arguments: str | bytes | float, patience: float | None) -> Any:
        """What an operation of the script answers; each may be run twice where an answer is lost."""
        return await self.patiently(lambda: self._script([self.prefix], [operation, *arguments]), patience)

    async def patiently(self, ask: Callable[[], Awaitable[T]], patience: float | None) -> T:
        """What Redis answers.

        Raises:
            QueueAway: when it has been away for `patience` seconds; with None it is waited for.
        """
        end = None if patience is None else time.monotonic() + patience
        for pause in pauses():
            try:
                return await ask()
            except Exception as error:
                if not _passes(error):
                    raise
                self.troubled = time.monotonic()
                if end is not None and time.monotonic() + pause > end:
                    raise QueueAway(f"the queue cannot be reached ({_reason(error)}): try again later.") from error
            await asyncio.sleep(pause)
        raise AssertionError("pauses have no end")

    async def listen(self, hear: Callable[[str, str], None], connected: Callable[[], None], *channels: str) -> None:
        """Calls `hear` with the channel and the text of each message, and `connected` whenever some may be missed."""
        said = ""
        between = pauses()

        def is_back() -> None:
            nonlocal said, between
            logger.info("connected to Redis")
            said, between = "", pauses()
            connected()

        while True:
            try:
                await self._listen(hear, is_back, channels)
            except Exception as error:
                if not _passes(error):
                    raise
                self.troubled = time.monotonic()
                if said != _reason(error):
                    said = _reason(error)
                    logger.error("Redis cannot be used (%s): it is tried until it can", said)
            await asyncio.sleep(next(between))

    async def _listen(
        self, hear: Callable[[str, str], None], connected: Callable[[], None], channels: Sequence[str]
    ) -> None:
        async with self.client.pubsub() as messages:
            await messages.subscribe(*(f"{self.prefix}:{name}" for name in channels))
            await self._warn()
            connected()
            while True:
                message = await messages.get_message(ignore_subscribe_messages=True, timeout=LOOK_S)
                if message is None:
                    await messages.ping()
                elif message["type"] == "message":
                    hear(message["channel"].decode().removeprefix(f"{self.prefix}:"), message["data"].decode())

    async def _warn(self) -> None:
        """Of a Redis that may lose what was accepted."""
        known = await self.client.info("persistence", "memory")
        if not known.get("aof_enabled"):
            logger.warning("Redis keeps no append-only file: what waits is lost with it; set appendonly yes.")
        if known.get("maxmemory") and known.get("maxmemory_policy") != "noeviction":
            logger.warning("Redis drops keys when its memory is full: set maxmemory-policy noeviction.")


def pauses() -> Iterator[float]:
    """Seconds to wait before each further try."""
    pause, most = PAUSES_S
    while True:
        yield pause * random.uniform(1, 1.5)
        pause = min(2 * pause, most)


def _passes(error: Exception) -> bool:
    """Whether it may be different later."""
    if isinstance(error, ResponseError):
        return isinstance(error, tuple(NAMED)) or str(error).startswith(PASSING)
    return isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError))


def _reason(error: Exception) -> str:
    """In words that tell nothing of where it is."""
    if type(error) in NAMED:
        return NAMED[type(error)]
    if isinstance(error, ResponseError):
        return f"it answers {str(error).split()[0]}"
    return "it does not answer"
