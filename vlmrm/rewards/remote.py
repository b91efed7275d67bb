"""Rewards that another process computes, over HTTP in Flow-Factory's protocol.

    GET  {server_url}/health    any status below 400: ready
    POST {server_url}/compute   {"prompt": [str] * B, "image": [png] * B, "video": [[png] * T] * B,
                                 "condition_images": [[png] * N] * B, "condition_videos": [[[png] * T] * N] * B}
                                a png is base64 of a PNG file, a medium that no sample has is null; where the
                                samples are a text policy's, "response": [str] * B beside them
      ->                        {"rewards": [number] * B}, or {"error": text}

Any server of this protocol will do, Flow-Factory's template among them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from PIL import Image
from pydantic import Field

from vlmrm.errors import ConfigError, RewardError
from vlmrm.formats.openai import answer_text
from vlmrm.http import Server, Unavailable, Unreachable, read_json, retried, run
from vlmrm.rewards.contract import (
    BaseRewardModel,
    GroupwiseRewardModel,
    PointwiseRewardModel,
    Processes,
    RewardArguments,
    RewardModelOutput,
)
from vlmrm.rewards.pictures import base64_of
from vlmrm.rewards.servers import CircuitBreaker, NotAsked, origin_at
from vlmrm.settings import Strict, validate

logger = logging.getLogger("vlmrm")

REST = 10.0  # seconds for which a server that failed is asked last
HEALTH_TIMEOUT = 5.0
OPENING_TIMEOUT = 30.0  # for the same at the start, while a busy machine loads much else
PAUSE = 1.0  # seconds of patience between two trials


class ClientSettings(Strict, strict=True):
    """How a server is asked: by all rewards that ask one."""

    timeout: float | None = Field(None, gt=0)
    retry_attempts: int = Field(3, ge=1)
    patience: float = Field(0.0, ge=0)
    wait_seconds: float = Field(0.0, ge=0)


class _Settings(ClientSettings):
    server_url: Any = None


class _Remote(BaseRewardModel):
    required_fields = ("prompt",)
    text_prompts = True
    options = tuple(_Settings.model_fields)
    default_timeout: ClassVar[float]

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        settings = validate(_Settings, config.extra_kwargs, f"reward {config.name}")
        urls = [settings.server_url] if isinstance(settings.server_url, str) else settings.server_url
        if not isinstance(urls, Sequence) or not urls or not all(isinstance(url, str) for url in urls):
            raise ConfigError(f"reward {config.name} has no server_url: write http://host:port, or a list of them.")
        self.servers = connected(config, urls, settings, self.default_timeout)

    # Without **kwargs, so that no other columns are gathered from other ranks.
    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
        condition_images: list[list[Image.Image]] | None = None,
        condition_videos: list[list[list[Image.Image]]] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        body = {
            "prompt": prompt,
            "image": _encode_media(image),
            "video": _encode_media(video),
            "condition_images": _encode_media(condition_images),
            "condition_videos": _encode_media(condition_videos),
        }
        if response is not None:
            body["response"] = [*map(answer_text, response)]
        return RewardModelOutput(rewards=_read_rewards(self.servers.post("/compute", json_content(body))))


class RemotePointwiseRewardModel(_Remote, PointwiseRewardModel):
    """A server's reward of each sample; a request has at most `batch_size` of them."""

    default_timeout = 60.0


class RemoteGroupwiseRewardModel(_Remote, GroupwiseRewardModel):
    """A server's rewards of the samples of one group; a request has one group."""

    default_timeout = 120.0


def connected(
    config: RewardArguments, urls: Sequence[str], settings: ClientSettings, timeout: float, **options: Any
) -> Endpoints:
    """Return the servers of a reward, one of which is ready; `timeout` is the default."""
    timeout = timeout if settings.timeout is None else settings.timeout
    servers = Endpoints(urls, timeout, settings.retry_attempts, settings.patience, **options)
    try:
        servers.wait_until_ready(settings.wait_seconds)
    except RewardError as error:
        raise RewardError(f"reward {config.name}: {error}") from None
    return servers


def _encode_media(media: Any) -> Any:
    """Return nested lists of images with each image as base64 of a PNG."""
    if media is None:
        return None
    if isinstance(media, Image.Image):
        return base64_of(media)
    return [_encode_media(item) for item in media]


def json_content(body: Any) -> dict[str, Any]:
    """Return the keywords of an httpx2 request with a JSON body."""
    return {"content": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}


def _read_rewards(answer: Any) -> list[float]:
    """Return the rewards in a server's answer; their number and range are checked as those of every reward model."""
    if not isinstance(answer, dict):
        raise RewardError(f"the server answered {_beginning(answer)}: it must be an object with the key rewards.")
    if answer.get("error"):
        raise RewardError(f"the server says: {_beginning(answer['error'])}")
    rewards = answer.get("rewards")
    if not isinstance(rewards, list) or not all(item is None or isinstance(item, float) for item in rewards):
        raise RewardError(f"the server answered {_beginning(answer)}: its rewards must be a list of numbers.")
    return rewards


def _beginning(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return text[:300]


class Endpoints:
    """Replicas of one server: each request goes to the least busy one, and to the next where one fails.

    All of them are tried `attempts` times, after a wait that grows, or that a server asks for (`Retry-After`).
    While none can be reached, that begins again for `patience` seconds. `of_each` are options of `Endpoint`.
    """

    def __init__(self, urls: Sequence[str], timeout: float, attempts: int, patience: float = 0.0, **of_each: Any):
        self.endpoints = [Endpoint(url, timeout, **of_each) for url in urls]
        self.attempts, self.patience = attempts, patience
        self._calls = itertools.count(1)

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until at least one server is ready; those that are not are asked last for a while."""

        async def ask(_: float) -> None:
            reasons = await asyncio.gather(*(endpoint.problem() for endpoint in self.endpoints))
            unready = [reason for reason in reasons if reason is not None]
            for endpoint, reason in zip(self.endpoints, reasons, strict=True):
                endpoint.rests_until = -math.inf if reason is None else time.monotonic() + REST
            why = "; ".join(unready)
            if len(unready) == len(self.endpoints):
                raise Unavailable(f"no reward server is ready ({why}): start it, or set wait_seconds to wait for it")
            if unready:
                logger.warning("going on without %d of %d reward servers (%s)", len(unready), len(reasons), why)

        run(retried(ask, seconds=seconds))

    def post(self, path: str, content: Mapping[str, Any]) -> Any:
        """Return the JSON answer of the first server that can be reached; `content` are keywords of httpx2."""
        return run(self.ask(path, content))

    async def ask(self, path: str, content: Mapping[str, Any]) -> Any:
        """Do what `post` does, on the event loop of `run`."""

        def paced() -> bool:
            return all(endpoint.circuit.suspects for endpoint in self.endpoints)

        end = time.monotonic() + self.patience
        while True:
            try:
                return await retried(lambda _: self._post_to_any(path, content), attempts=self.attempts, paced=paced)
            except (Unavailable, NotAsked):
                if time.monotonic() + PAUSE >= end:
                    raise
                await asyncio.sleep(PAUSE)

    async def _post_to_any(self, path: str, content: Mapping[str, Any]) -> Any:
        tried: dict[Endpoint, RewardError] = {}
        while len(tried) < len(self.endpoints):
            # Not one that rests, then the least busy, then the one that was used least recently.
            now = time.monotonic()
            endpoint = min(
                (endpoint for endpoint in self.endpoints if endpoint not in tried),
                key=lambda candidate: (candidate.rests_until > now, candidate.busy, candidate.last_used),
            )
            endpoint.busy += 1
            endpoint.last_used = next(self._calls)
            try:
                return await endpoint.post(path, content)
            except (Unavailable, NotAsked) as error:
                endpoint.rests_until = time.monotonic() + REST
                tried[endpoint] = error
            finally:
                endpoint.busy -= 1
        reasons = "; ".join(str(error) for error in tried.values())
        asked = [error for error in tried.values() if isinstance(error, Unavailable)]
        if not asked:
            raise NotAsked(reasons)
        waits = [error.wait for error in asked if error.wait is not None]
        raise Unavailable(reasons, min(waits) if len(waits) == len(asked) else None)


class Endpoint:
    """One address of `Endpoints`; after `silence` seconds without any answer, /health included, it is down."""

    def __init__(self, url: str, timeout: float, token: str | None = None, silence: float | None = None):
        self.server = Server(url, "server_url", token)
        self.timeout, self.silence = timeout, silence
        self.busy = self.last_used = 0
        self.rests_until = -math.inf

    @property
    def circuit(self) -> CircuitBreaker:
        return origin_at(self.server.origin).circuit(self.server.name)

    async def problem(self) -> str | None:
        """Return why the server cannot be used now; None where it can."""
        try:
            status = (await self._health(OPENING_TIMEOUT)).status_code
        except RewardError as error:
            return str(error)
        return None if status < 400 else f"{self.server.name}/health answered {status}"

    async def _health(self, seconds: float) -> Any:
        return await self.server.call("GET", "/health", seconds, late=Unreachable)

    async def post(self, path: str, content: Mapping[str, Any]) -> Any:
        """Return the JSON answer to a request; raises as `Server.call`, `read_json` and `CircuitBreaker.call` do."""

        async def send(probe: bool) -> Any:
            if probe:  # one that fell silent would take another call as long; that it is there, it says at once
                await self._health(HEALTH_TIMEOUT)
            call = self.server.call("POST", path, self.timeout, **content)
            known = origin_at(self.server.origin)
            return read_json(await (known.watched(call, self._health, self.silence) if self.silence else call))

        return await self.circuit.call(send)
