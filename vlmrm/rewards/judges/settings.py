"""What every judge can be told: the server, the model, how long to wait and how often to ask."""

from __future__ import annotations

import os
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from vlmrm.errors import ConfigError
from vlmrm.rewards.contract import RewardArguments
from vlmrm.settings import checked

NO_KEY = "EMPTY"  # what servers without keys are given, since the client must send one


class JudgeSettings(BaseModel):
    """The keys that all judges take; one kind's own are in a class derived from this."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    api_base_url: str = "http://localhost:8000/v1"
    """Of an OpenAI-compatible server, up to and with `/v1`."""
    api_key: SecretStr | None = None
    """Sent to the server; better left in the environment, see `api_key_env`."""
    api_key_env: str | None = None
    """The environment variable that holds the key."""
    vlm_model: str
    """The model's name on the server."""
    temperature: float = Field(0.0, ge=0)
    """0 asks for the likeliest reply; above it replies are sampled, and none is used twice."""
    max_tokens: int = Field(2048, ge=1)
    """Of a reply; one that is cut off is a failure."""
    max_frames: int = Field(8, ge=1)
    """Frames of a video that are shown, spread evenly."""
    max_concurrent: int = Field(8, ge=1)
    """Items that are with the server at a time."""
    max_retries: int = Field(5, ge=0)
    """Further calls for an item, where another one can help."""
    timeout: float = Field(180.0, gt=0)
    """Seconds for one call."""
    deadline: float = Field(600.0, gt=0)
    """Seconds for an item, all its calls and the waits between them together."""
    breaker_failures: int = Field(8, ge=1)
    """So many items failed in a row, and the next ones fail at once."""
    breaker_seconds: float = Field(30.0, ge=0)
    """How long they do, before one item tries the server again."""
    max_cache_size: int = Field(1024, ge=0)
    """Replies kept in memory."""
    cache_dir: str | None = None
    """A folder for replies, which outlive the process there."""
    prompt_price: float = Field(0.0, ge=0)
    """Of a million tokens sent."""
    completion_price: float = Field(0.0, ge=0)
    """Of a million tokens received."""

    def key(self) -> str:
        """The API key, or `NO_KEY`.

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


def read_settings(cls: type[Settings], config: RewardArguments) -> Settings:
    """The settings in a reward's configuration.

    Raises:
        ConfigError: naming the reward and the key.
    """
    where = f"reward {config.name}"
    settings = checked(cls, config.extra_kwargs, where, secret=True)
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
