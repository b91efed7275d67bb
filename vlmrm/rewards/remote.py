"""Rewards that another process computes, asked over HTTP in Flow-Factory's protocol.

    GET  {server_url}/health    any status below 400: ready
    POST {server_url}/compute   {"prompt": [str] * B, "image": [png] * B, "video": [[png] * T] * B,
                                 "condition_images": [[png] * N] * B, "condition_videos": [[[png] * T] * N] * B}
                                a png is base64 of a PNG file, a medium that no sample has is null
      ->                        {"rewards": [number] * B}, or {"error": text}

Any server that speaks it can be asked, Flow-Factory's template among them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from accelerate import Accelerator, PartialState
from PIL import Image

from vlmrm.data.media import png_of
from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import (
    BaseRewardModel,
    GroupwiseRewardModel,
    PointwiseRewardModel,
    RewardArguments,
    RewardModelOutput,
)
from vlmrm.rewards.endpoints import Endpoints


class _Remote(BaseRewardModel):
    required_fields = ("prompt",)
    text_prompts = True
    options = ("server_url", "timeout", "retry_attempts", "wait_seconds")
    default_timeout: ClassVar[float]

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        given = config.extra_kwargs
        attempts = given.get("retry_attempts", 3)
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise ConfigError(
                f"reward {config.name}: retry_attempts is {attempts!r}: write a whole number, at least 1."
            )
        timeout = self._seconds("timeout", self.default_timeout)
        if timeout == 0:
            raise ConfigError(f"reward {config.name}: timeout is 0: write more seconds.")
        urls = given.get("server_url")
        urls = [urls] if isinstance(urls, str) else urls
        if not isinstance(urls, Sequence) or not urls or not all(isinstance(url, str) for url in urls):
            raise ConfigError(f"reward {config.name} has no server_url: write http://host:port, or a list of them.")
        self.servers = Endpoints(urls, timeout=timeout, attempts=attempts)
        try:
            self.servers.wait_until_ready(self._seconds("wait_seconds", 0))
        except RewardError as error:
            raise RewardError(f"reward {config.name}: {error}") from None

    def _seconds(self, name: str, default: float) -> float:
        value = self.config.extra_kwargs.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"reward {self.config.name}: {name} is {value!r}: write a number of seconds.")
        return float(value)

    # Without **kwargs: other columns are neither brought together from other ranks nor sent.
    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
        condition_images: list[list[Image.Image]] | None = None,
        condition_videos: list[list[list[Image.Image]]] | None = None,
    ) -> RewardModelOutput:
        body = {
            "prompt": prompt,
            "image": _encoded(image),
            "video": _encoded(video),
            "condition_images": _encoded(condition_images),
            "condition_videos": _encoded(condition_videos),
        }
        return RewardModelOutput(rewards=_rewards(self.servers.post("/compute", json.dumps(body).encode())))


class RemotePointwiseRewardModel(_Remote, PointwiseRewardModel):
    """A server's reward of each sample; a request has at most `batch_size` of them.

    Settings: `server_url`, one address or a list of servers that do the same; `timeout` (60 s) to connect and of
    silence; `retry_attempts` (3), how often all servers are asked; `wait_seconds` (0) until the first must be ready.
    """

    default_timeout = 60.0


class RemoteGroupwiseRewardModel(_Remote, GroupwiseRewardModel):
    """A server's rewards of samples among their group; a request has one whole group.

    Settings as of `RemotePointwiseRewardModel`; `timeout` is 120 s.
    """

    default_timeout = 120.0


def _encoded(media: Any) -> Any:
    """Lists of images, however deep, with each image as base64 of a PNG."""
    if media is None:
        return None
    if isinstance(media, Image.Image):
        return base64.b64encode(png_of(media)).decode("ascii")
    return [_encoded(item) for item in media]


def _rewards(answer: Any) -> list[float]:
    """The rewards in a server's answer; their number and that they are finite is checked of every reward model."""
    if not isinstance(answer, dict):
        raise RewardError(f"the server answered {_start(answer)}: it must be an object with the key rewards.")
    if answer.get("error"):
        raise RewardError(f"the server says: {_start(answer['error'])}")
    rewards = answer.get("rewards")
    if not isinstance(rewards, list) or not all(item is None or isinstance(item, float) for item in rewards):
        raise RewardError(f"the server answered {_start(answer)}: its rewards must be a list of numbers.")
    return rewards


def _start(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return text[:300]
