"""The settings of the service, from a TOML file and the command line, validated key by key."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, IPvAnyNetwork, SecretStr, model_validator

from vlmrm.errors import ConfigError, MediaError
from vlmrm.libraries import parse_dtype
from vlmrm.settings import Strict, load_file, validate


def _check_token(token: SecretStr) -> SecretStr:
    """Refuse a token that no `Authorization` header can carry."""
    text = token.get_secret_value()
    if not (text.isascii() and text.isprintable() and text == text.strip()):
        raise ValueError("no header carries it: use printable ASCII characters, without spaces around them")
    return token


Token = Annotated[SecretStr, AfterValidator(_check_token)]
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


def _dtype(name: str, *, auto: bool = False) -> str:
    try:
        return parse_dtype(name, auto=auto)
    except ConfigError as error:  # pydantic adds the key
        raise ValueError(str(error)) from None


class RewardSettings(Strict):
    """One `[[reward_args]]`: a reward, its devices and its options.

    `reward_type` is `vlm_reward`, a model trained here; a name or path that `vlmrm.rewards` knows; or `engine`'s name.
    """

    reward_type: str
    name: str = ""  # in requests; default: reward_type
    model_path: str = ""
    venv_python: str = sys.executable
    download_path: str = ""
    setup_script: str = ""  # run by `serve prepare` with download_path and the environment's folder
    dtype: str = "auto"
    device: str = ""
    enable: bool = True
    endpoint_url: str = ""
    endpoint_api_key: SecretStr = SecretStr("")
    engine: str = ""
    import_from: list[str] = Field(default_factory=list)  # folders on the import path of `engine`
    options: dict[str, Any] = Field(default_factory=dict, repr=False)  # may hold keys
    replicas: Count = 1
    devices: list[str] = Field(default_factory=list)  # of the replicas in turn, such as cuda:0
    batch_tokens: Count = 65536  # estimated, of one batch
    batch_timeout: Seconds = 600.0
    load_timeout: Seconds = 3600.0

    @model_validator(mode="after")
    def _normalize(self) -> RewardSettings:
        self.name = self.name or self.reward_type
        if not self.engine:  # which has its own names of types
            self.dtype = _dtype(self.dtype, auto=True)
        return self


DEFAULT, OTHER = "default", "other"  # the client that sends the service's `token`; in metrics all without a name


class ClientSettings(Strict):
    """One `[[clients]]`: whoever sends its token."""

    name: Annotated[str, Field(min_length=1)]
    token: Annotated[Token, Field(min_length=1)]
    rewards: list[str] = Field(default_factory=list)  # that it opens; none: all, and what concerns the whole service
    weight: float = Field(1.0, gt=0)  # of its share


class Limits(Strict):
    """The limits of one request, and of the queue."""

    max_body_bytes: Count = 256 * 2**20
    max_items: Count = 1024
    max_bodies_bytes: Count = 2 * 2**30  # of all requests at the same time
    max_wait: Seconds = 2.0  # for a request's turn in this process, above which it is refused before it is parsed
    max_pixels: Count = 32 * 2**20  # of one image, which is an 8K frame
    max_total_pixels: Count = 256 * 2**20  # of all images and frames of one request; a pixel takes some 30 bytes
    max_frames: Count = 1024  # of one video
    max_image_bytes: Count = 64 * 2**20  # of one image as a file
    max_json_depth: Count = 32
    max_json_values: Count = 200_000
    max_text_bytes: Count = 16 * 2**20  # of the JSON's texts that are no media
    body_timeout: Seconds = 120.0  # until the body of a request has come
    fetch_timeout: Seconds = 20.0  # for one image of an allowed host
    queue_items: Count = 100_000  # that wait for one reward
    queue_bytes: Count = 4 * 2**30  # of what waits for all rewards
    result_ttl: float = Field(3600.0, ge=0)
    max_results: Count = 100_000  # kept in the service's own memory; in Redis by `result_ttl` alone
    silence: Seconds = 30.0  # without a sign of life, after which a worker or its host counts as dead

    def check_image(self, width: int, height: int) -> None:
        """Raise MediaError for an image of more than `max_pixels`."""
        if width * height > self.max_pixels:
            raise MediaError(f"an image is {width}x{height} pixels, over the limit of {self.max_pixels}")


class DecodeSettings(Strict):
    """`[decode_args]`: the decoder of video latents, Wan's in the layout of diffusers."""

    model_path: str
    subfolder: str = ""  # of model_path, where that is a pipeline: vae
    venv_python: str = sys.executable
    dtype: Annotated[str, AfterValidator(_dtype)] = "bfloat16"
    device: str = ""
    cache_bytes: int = Field(2**30, ge=0)  # of decoded videos, for the other rewards of a request
    timeout: Seconds = 600.0  # for one video


class ServiceSettings(Strict):
    """The configuration file. Without a Redis, queue and results are in the service's process."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    redis_host: str = ""
    redis_port: int = Field(6379, ge=1, le=65535)
    redis_url: SecretStr = SecretStr("")  # instead of both: redis:// or, for TLS, rediss:// with redis-py's options
    redis_password: SecretStr = SecretStr("")
    redis_sentinels: list[SecretStr] = Field(default_factory=list)  # by URL; they know the master that redis_url names
    redis_prefix: str = "vlmrm"  # begins every key, so that several services can share one Redis
    long_poll: float = Field(4.0, ge=0, le=60)  # seconds that a pull waits for its result
    token: Token = SecretStr("")
    clients: list[ClientSettings] = Field(default_factory=list)
    admin_token: Token = SecretStr("")  # for the routes that change models; without one, nobody may
    trusted_proxies: list[IPvAnyNetwork] = Field(default_factory=list)  # whose X-Forwarded-For is believed
    model_roots: list[str] = Field(default_factory=list)  # folders, or patterns of repositories, of such models
    media_root: Path | None = None
    allowed_hosts: list[str] = Field(default_factory=list)  # that image URLs may name: NAME[:PORT]
    log_format: Literal["text", "json"] = "text"
    handlers: Count = 2  # processes that parse requests
    limits: Limits = Field(default_factory=Limits)
    reward_args: list[RewardSettings] = Field(default_factory=list)
    decode_args: DecodeSettings | None = None

    @property
    def callers(self) -> list[ClientSettings]:
        """Everybody who has a token: `clients`, and whoever sends the service's."""
        own = [ClientSettings(name=DEFAULT, token=self.token)] if self.token.get_secret_value() else []
        return [*self.clients, *own]

    @property
    def queue_limits(self) -> tuple[int, int]:
        """How many items may wait for each reward, and bytes of these: an equal part of all."""
        return self.limits.queue_items, max(1, self.limits.queue_bytes // len(self.reward_args))

    @property
    def has_redis(self) -> bool:
        return bool(self.redis_host or self.redis_url.get_secret_value())

    @model_validator(mode="after")
    def _check(self) -> ServiceSettings:
        url = bool(self.redis_url.get_secret_value())
        if (url and self.redis_host) or (self.redis_sentinels and not url):
            raise ValueError("give either redis_host, or redis_url, which names the master of redis_sentinels")
        callers = self.callers
        called, tokens = [client.name for client in callers], [client.token for client in callers]
        rewards = [reward.name for reward in self.reward_args]  # others may serve those that are not enabled here
        for client in callers:
            if [OTHER, *called].count(client.name) > 1 or tokens.count(client.token) > 1:
                raise ValueError(f"the client {client.name} has another's name or token: give each its own")
            if unknown := [name for name in client.rewards if name not in rewards]:
                raise ValueError(f"the client {client.name} opens {unknown[0]}: choose from {', '.join(rewards)}")
        if callers and self.trusted_proxies:
            raise ValueError("trusted_proxies tell clients apart by address, but here tokens do: leave them out")
        self.reward_args = [reward for reward in self.reward_args if reward.enable]
        names = [reward.name for reward in self.reward_args]
        if not names:
            raise ValueError("no reward is enabled: give at least one [[reward_args]]")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} rewards are called {name}: give each a name of its own")
        return self


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def load_settings(path: Path, environment: Mapping[str, str] = os.environ, **overrides: Any) -> ServiceSettings:
    """Load settings from a TOML file; `overrides` take precedence, `VLMRM_TOKEN` and the like over both."""
    return validate_settings({**load_file(path), **overrides}, str(path), environment)


def validate_settings(
    content: dict[str, Any], source: str, environment: Mapping[str, str] = os.environ
) -> ServiceSettings:
    """Return `content` as settings; `source` begins the messages of errors."""
    for key in ("token", "admin_token", "redis_url", "redis_password"):
        variable = f"VLMRM_{key.upper()}"
        if environment.get(variable):
            content = {**content, key: environment[variable]}
    settings = validate(ServiceSettings, content, source, secret=True)
    if settings.host not in LOOPBACK and not settings.callers:
        raise ConfigError(
            f"{source}: other machines can reach host {settings.host}, without a token: set VLMRM_TOKEN."
        )
    return settings
