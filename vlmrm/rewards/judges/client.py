"""A client of one judge's server: bounded concurrency, retries, a deadline, a circuit breaker, and a reply cache.

A call that fails is tried again, a reply that cannot be read is asked for again, both within the round's deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from vlmrm.errors import ConfigError, Denied, RewardError
from vlmrm.http import Server, Unavailable, check_status, retried, run, without_token
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.replies import Question, Reply, ReplyCache, read_completion
from vlmrm.rewards.servers import SILENCE, CircuitBreaker, KnownServer, origin_at
from vlmrm.settings import validate

logger = logging.getLogger("vlmrm")

NO_KEY = "EMPTY"  # sent to servers without keys
TRANSIENT = (408, 409, 429, *range(500, 600))  # timeout, conflict, too many requests, and faults of the server


class JudgeSettings(BaseModel):
    """The settings of every judge; a judge's own are in a subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    api_base_url: str = "http://localhost:8000/v1"
    """Address of an OpenAI-compatible server, including `/v1`."""
    api_key: SecretStr | None = None
    """The API key; better left in the environment, see `api_key_env`."""
    api_key_env: str | None = None
    """The environment variable that holds the key."""
    vlm_model: str
    """The model's name on the server."""
    temperature: float = Field(0.0, ge=0)
    """0: greedy decoding; above 0 replies are sampled and never cached."""
    max_tokens: int = Field(2048, ge=1)
    """Longest reply; one that is cut off is a failure."""
    max_frames: int = Field(8, ge=1)
    """Frames of a video to show, evenly spaced."""
    max_concurrent: int = Field(8, ge=1)
    """Concurrent items on the server."""
    max_retries: int = Field(5, ge=0)
    """Retries of an item, where a retry may succeed."""
    malformed_retries: int = Field(2, ge=0)
    """Times that an item is asked again because its reply cannot be read; sampled, as the likeliest reply is known."""
    timeout: float = Field(180.0, gt=0)
    """Seconds for one call."""
    deadline: float = Field(600.0, gt=0)
    """Seconds for a round, the samples of one call, including retries and waits."""
    silence: float = Field(SILENCE, gt=0)
    """Seconds without any answer of the server, to calls or to `GET /models`, after which it is taken to be down."""
    max_cache_size: int = Field(1024, ge=0)
    """Replies kept in memory."""
    cache_dir: str | None = None
    """Folder that keeps replies across runs."""

    def key(self) -> str:
        """Return the API key, or `NO_KEY`; raise ConfigError when the environment variable is not set."""
        if self.api_key_env is not None:
            if not os.environ.get(self.api_key_env):
                raise ConfigError(
                    f"api_key_env is {self.api_key_env}, but there is no such environment variable: export it."
                )
            return os.environ[self.api_key_env]
        return NO_KEY if not self.api_key else self.api_key.get_secret_value()


Settings = TypeVar("Settings", bound=JudgeSettings)
Check = Callable[[Question, Reply], object]  # raises a RewardError for a reply that cannot be read


def read_settings(cls: type[Settings], config: RewardArguments) -> Settings:
    """Return the settings of a reward's configuration; raise ConfigError naming the reward and the key."""
    where = f"reward {config.name}"
    settings = validate(cls, config.extra_kwargs, where, secret=True)
    url = urlsplit(settings.api_base_url)
    if url.username or url.password:
        raise ConfigError(f"{where}: api_base_url holds more than an address: give the key by api_key_env.")
    if settings.api_key is not None and settings.api_key_env is not None:
        raise ConfigError(f"{where}: api_key and api_key_env are both given: keep api_key_env.")
    if settings.cache_dir is not None and settings.temperature > 0:
        raise ConfigError(
            f"{where}: cache_dir keeps replies, and at a temperature of {settings.temperature:g} each is another: set "
            "temperature to 0 or remove cache_dir."
        )
    return settings


class Malformed(RewardError):
    """A `reply` that cannot be read, as those before it."""

    def __init__(self, message: str, reply: Reply):
        super().__init__(message)
        self.reply = reply


class JudgeClient:
    """A client of the server of `settings`; any number of threads may use it."""

    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        self.cache = ReplyCache(settings.max_cache_size, settings.cache_dir)
        # HTTP requests, those after one that failed, replies asked for again, items without one, tokens as reported.
        self.usage: Counter[str] = Counter()
        self._lock = threading.Lock()
        # One connection more than calls, so that whether the server lives can always be asked.
        most = settings.max_concurrent + 1
        self.server = Server(settings.api_base_url, "api_base_url", settings.key(), connections=most)
        self._slots: dict[int, asyncio.Semaphore] = {}  # by process

    @property
    def circuit(self) -> CircuitBreaker:
        return self._origin.circuit(f"{self.server.name} {self.settings.vlm_model}")

    @property
    def _origin(self) -> KnownServer:
        return origin_at(self.server.origin)

    def ask(self, questions: Sequence[Question], check: Check | None = None) -> list[Reply | RewardError]:
        """Return a reply to each question, in order, or why there is none. Equal questions are asked once.

        A reply that `check` raises a RewardError for is asked for again, and at last a `Malformed`; one that passes is
        cached. At a temperature above 0 replies are sampled, so every question is asked.
        """
        if self.settings.temperature > 0:
            return run(self._answer_all(questions, check))
        replies: dict[str, Reply | RewardError] = {}
        missing: dict[str, Question] = {}
        for question in questions:
            reply = self.cache.get(question.key)
            if reply is None:
                missing[question.key] = question
            else:
                replies[question.key] = reply
                self._count(cache_hits=1)
        if missing:
            for key, reply in zip(missing, run(self._answer_all(list(missing.values()), check)), strict=True):
                replies[key] = reply
                if check is not None and isinstance(reply, Reply):
                    self.cache.put(key, reply)
        return [replies[question.key] for question in questions]

    def _count(self, **counts: int) -> None:
        with self._lock:
            self.usage.update(counts)

    async def _answer_all(self, questions: Sequence[Question], check: Check | None) -> list[Reply | RewardError]:
        end = asyncio.get_running_loop().time() + self.settings.deadline
        return await asyncio.gather(*(self._answer(question, end, check) for question in questions))

    async def _answer(self, question: Question, end: float, check: Check | None) -> Reply | RewardError:
        slots = self._slots.setdefault(os.getpid(), asyncio.Semaphore(self.settings.max_concurrent))
        try:
            async with asyncio.timeout_at(end), slots:
                return await self._readable(question, end, check)
        except TimeoutError:
            error = RewardError(f"there was no answer within the deadline of {self.settings.deadline:g} s")
        except Malformed as malformed:
            self._count(failures=1)
            return malformed
        except RewardError as reason:
            error = reason
        self._count(failures=1)
        kind = Denied if isinstance(error, Denied) else RewardError
        reason = str(error).replace(f"{self.server.name}/", "/")
        return kind(f"the judge {self.settings.vlm_model} at {self.settings.api_base_url}: {reason}")

    async def _readable(self, question: Question, end: float, check: Check | None) -> Reply:
        """Return a reply that `check` passes."""
        sent = question
        for left in range(self.settings.malformed_retries, -1, -1):
            reply = await self._try(sent, end)
            try:
                if check is not None:
                    check(question, reply)
                return reply
            except RewardError as error:
                if not left:
                    raise Malformed(str(error), reply) from error
            self._count(malformed=1)
            sent = question.sampled()
        raise AssertionError("the last reply is returned or malformed")

    async def _try(self, question: Question, end: float) -> Reply:
        calls, left = itertools.count(), end - asyncio.get_running_loop().time()

        async def send(_: bool) -> Reply:
            self._count(retries=int(next(calls) > 0))
            return await self._post(question)

        return await retried(
            lambda _: self.circuit.call(send),
            attempts=1 + self.settings.max_retries,
            seconds=left,
            longest=left,
            paced=lambda: self.circuit.suspects,
        )

    async def _post(self, question: Question) -> Reply:
        """Send one HTTP request; raises as `Server.call`, `check_status` and `read_completion` do."""
        self._count(calls=1)
        call, headers = self.server.call, {"Content-Type": "application/json"}
        post = call(
            "POST",
            "/chat/completions",
            self.settings.timeout,
            late=Unavailable,
            content=question.content,
            headers=headers,
        )
        # Whatever it answers to a ping, a server that answers works.
        answer = await self._origin.watched(
            post, lambda seconds: call("GET", "/models", seconds), self.settings.silence
        )
        check_status(answer, TRANSIENT)
        reply = read_completion(without_token(answer))
        self._count(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return reply


def check_not_denied(replies: Sequence[object]) -> None:
    """Raise Denied where all was refused for what any other question would be: the key, or the model's name."""
    if replies and all(isinstance(reply, Denied) for reply in replies):
        raise Denied(str(replies[0]))
