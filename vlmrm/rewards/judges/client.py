"""A client of one judge's server: bounded concurrency, retries, a deadline, a circuit breaker, and a reply cache.

A call that fails is tried again, a reply that cannot be read is asked for again, both within the round's deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from vlmrm.errors import ConfigError, Denied, RewardError
from vlmrm.http import (
    Refused,
    ServerAddress,
    Unavailable,
    Unreachable,
    one_line,
    refusal,
    retry_after,
    translate_http_errors,
    wait_seconds,
)
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.judges.replies import Question, Reply, ReplyCache, read_completion
from vlmrm.rewards.servers import run, server_at
from vlmrm.settings import validate

logger = logging.getLogger("vlmrm")

NO_KEY = "EMPTY"  # sent to servers without keys
TRANSIENT = (408, 409, 429)  # timeout, conflict, too many requests; and 500 or more
LONGEST_PAUSE = 30.0  # seconds before another try, unless the server asks for more


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
    silence: float = Field(9.0, gt=0)
    """Seconds without any answer of the server, to calls or to `GET /models`, after which it is taken to be down."""
    max_cache_size: int = Field(1024, ge=0)
    """Replies kept in memory."""
    cache_dir: str | None = None
    """Folder that keeps replies across runs."""
    prompt_price: float = Field(0.0, ge=0)
    """Price of a million prompt tokens."""
    completion_price: float = Field(0.0, ge=0)
    """Price of a million completion tokens."""

    def key(self) -> str:
        """Return the API key, or `NO_KEY`.

        Raises:
            ConfigError: when the environment variable is not set.
        """
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
    """Return the settings of a reward's configuration.

    Raises:
        ConfigError: naming the reward and the key.
    """
    where = f"reward {config.name}"
    settings = validate(cls, config.extra_kwargs, where, secret=True)
    url = urlsplit(settings.api_base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{where}: api_base_url is no http address: write something like http://localhost:8000/v1.")
    if url.username or url.password or url.query:
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


@dataclass(frozen=True)
class RoundLimits:
    """The end of one call of `ask`, by the loop's clock and by the client's, and its check of replies."""

    loop_end: float
    end: float
    check: Check | None


class JudgeClient:
    """A client of the server of `settings`; any number of threads may use it.

    Args:
        sleep, clock, jitter: time and randomness, for tests; the deadline is measured by the event loop's own clock.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ):
        self.settings = settings
        self.sleep, self.clock, self.jitter = sleep, clock, jitter
        self.cache = ReplyCache(settings.max_cache_size, settings.cache_dir)
        self.usage = Usage(settings.prompt_price, settings.completion_price)
        self.slots = asyncio.Semaphore(settings.max_concurrent)
        self.takes_response_format = True  # until the server refuses one
        self.healthy = True  # False once a warning was logged, until the next reply
        self._key = SecretStr(settings.key())
        address = ServerAddress(settings.api_base_url, "api_base_url", self._key.get_secret_value())
        self.server = server_at(address.origin)
        self.circuit = self.server.circuit(f"{address.name} {settings.vlm_model}", clock)
        # One connection more than calls, so that whether the server lives can always be asked.
        self._http = address.async_client(settings.timeout, settings.max_concurrent + 1)

    def ask(self, questions: Sequence[Question], check: Check | None = None) -> list[Reply | RewardError]:
        """Return a reply to each question, in order, or why there is none. Equal questions are asked once.

        A reply that `check` raises a RewardError for is asked for again, and at last a `Malformed`. The cache returns
        only replies that were passed to `keep`. At a temperature above 0 replies are sampled, so every question is
        asked.
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
                self.usage.add(cache_hits=1)
        if missing:
            replies |= zip(missing, run(self._answer_all(list(missing.values()), check)), strict=True)
        return [replies[question.key] for question in questions]

    def keep(self, question: Question, reply: Reply) -> None:
        """Put a reply from which a reward was read into the cache, unless it was sampled or is cached."""
        if self.settings.temperature == 0 and self.cache.get(question.key) is None:
            self.cache.put(question.key, reply)

    async def _answer_all(self, questions: Sequence[Question], check: Check | None) -> list[Reply | RewardError]:
        seconds = self.settings.deadline
        round_ = RoundLimits(asyncio.get_running_loop().time() + seconds, self.clock() + seconds, check)
        return await asyncio.gather(*(self._answer(question, round_) for question in questions))

    async def _answer(self, question: Question, round_: RoundLimits) -> Reply | RewardError:
        try:
            async with asyncio.timeout_at(round_.loop_end), self.slots:
                return await self._readable(question, round_)
        except TimeoutError:
            error = RewardError(f"there was no answer within the deadline of {self.settings.deadline:g} s")
        except Malformed as malformed:
            self.usage.add(failures=1)
            return malformed
        except RewardError as reason:
            error = reason
        self.usage.add(failures=1)
        kind = Denied if isinstance(error, Denied) else RewardError
        return kind(f"the judge {self.settings.vlm_model} at {self.settings.api_base_url}: {error}")

    async def _readable(self, question: Question, round_: RoundLimits) -> Reply:
        """Return a reply that the round's check passes."""
        sent = question
        for left in range(self.settings.malformed_retries, -1, -1):
            reply = await self._try(sent, round_.end)
            try:
                if round_.check is not None:
                    round_.check(question, reply)
                return reply
            except RewardError as error:
                if not left:
                    raise Malformed(str(error), reply) from error
            self.usage.add(malformed=1)
            sent = question.sampled()
        raise AssertionError("the last reply is returned or malformed")

    async def _try(self, question: Question, end: float) -> Reply:
        tries = 1 + self.settings.max_retries
        for number in range(1, tries + 1):
            try:
                return await self._through_circuit(question, number > 1)
            except Unavailable as error:
                if number == tries:
                    raise
                pause = wait_seconds(error, number, self.jitter(), LONGEST_PAUSE)
                if not error.busy:  # the circuit paces the calls of a server that is down, and ends them
                    pause = 0.0 if self.circuit.suspects else min(pause, self.circuit.patience)
                if self.clock() + pause > end:
                    raise RewardError(
                        f"{error}; waiting {pause:.0f} s for another try would pass the deadline of "
                        f"{self.settings.deadline:g} s"
                    ) from error
                self._warn(error, tries - 1)
                await self.sleep(pause)
        raise AssertionError("there is always a last try")

    def _warn(self, error: RewardError, retries: int) -> None:
        if self.healthy:  # one warning, however many items fail
            self.healthy = False
            message = "the judge %s at %s: %s; asking again, up to %d times an item"
            logger.warning(message, self.settings.vlm_model, self.settings.api_base_url, error, retries)

    async def _through_circuit(self, question: Question, retried: bool) -> Reply:
        async def send(_: bool) -> Reply:
            self.usage.add(retries=int(retried))
            return await self._call(question)

        reply = await self.circuit.call(send, self.sleep)
        self.healthy = True
        return reply

    async def _call(self, question: Question) -> Reply:
        """Send one call; without `response_format` where the server refuses it."""
        if not question.structured:
            return await self._post(question)
        refusal = None
        if self.takes_response_format:
            try:
                return await self._post(question)
            except Refused as error:
                refusal = error
        # Remembered only once this succeeds: the item itself may be what the server refuses.
        reply = await self._post(question.unstructured())
        if self.takes_response_format:
            self.takes_response_format = False
            message = "the judge %s does not take response_format (%s); its replies are read as text from now on"
            logger.warning(message, self.settings.vlm_model, refusal)
        return reply

    async def _post(self, question: Question) -> Reply:
        """Send one HTTP request.

        Raises:
            Unavailable: when a retry may succeed.
            Refused: when the server refuses this question.
            RewardError: when it refuses every question, or its answer is no completion.
        """
        self.usage.add(calls=1)
        post = self._http.post(
            "/chat/completions", content=question.content, headers={"Content-Type": "application/json"}
        )
        late = Unavailable(f"it did not answer within {self.settings.timeout:g} s")
        with translate_http_errors("it", late):
            try:
                async with asyncio.timeout(self.settings.timeout):  # the client's own is of the next byte
                    answer = await self.server.watched(post, self._ping, self.settings.silence)
            except TimeoutError:
                raise late from None
        text = self._redacted(answer.text)
        if not answer.is_success:
            raise call_error(answer.status_code, one_line(text), retry_after(answer.headers.get("Retry-After")))
        reply = read_completion(text)
        self.usage.add(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return reply

    async def _ping(self) -> None:
        """Ask for anything: whatever the answer, a server that gives one works."""
        with translate_http_errors("it", Unreachable("it is silent")):
            await self._http.get("/models")

    def _redacted(self, text: str) -> str:
        """Remove the API key, which a server's error message may repeat."""
        key = self._key.get_secret_value()
        return text if key == NO_KEY else text.replace(key, "<api key>")


def not_denied(replies: Sequence[Reply | RewardError]) -> Sequence[Reply | RewardError]:
    """Return what `ask` returned.

    Raises:
        Denied: when all was refused for what any other question would be: the key, or the model's name.
    """
    if replies and all(isinstance(reply, Denied) for reply in replies):
        raise Denied(str(replies[0]))
    return replies


def call_error(status: int, detail: str, retry_after: float | None) -> RewardError:
    """Return the error of an HTTP status: Unavailable, or a `refusal` that no retry mends."""
    reason = f"it answered {status}: {detail}"
    if status in TRANSIENT or status >= 500:
        return Unavailable(reason, retry_after, busy=status == 429)
    return refusal(status, reason)


@dataclass
class Usage:
    """Counts of one judge in this process; prices are for a million tokens, in any currency.

    `calls` are HTTP requests, `retries` those after one that failed, `malformed` replies asked for again; `failures`
    are items without a reply. Tokens are as the server reports them; a reply from the cache costs none.
    """

    prompt_price: float = 0.0
    completion_price: float = 0.0
    calls: int = 0
    retries: int = 0
    malformed: int = 0
    cache_hits: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    @property
    def cost(self) -> float:
        """Return the price of all tokens so far."""
        return (self.prompt_tokens * self.prompt_price + self.completion_tokens * self.completion_price) / 1e6
