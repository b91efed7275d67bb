"""What a judge is asked, and what it answers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from vlmrm.errors import RewardError


@dataclass(frozen=True)
class Question:
    """One call of `/chat/completions` as the bytes that are sent."""

    content: bytes

    @classmethod
    def of(cls, model: str, messages: list[dict[str, Any]], parameters: dict[str, Any]) -> Question:
        return cls(_json({"model": model, "messages": messages, **parameters}))

    @cached_property
    def key(self) -> str:
        """The same for the same model, messages and parameters."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def structured(self) -> bool:
        return b'"response_format":' in self.content  # inside a text its quotes would be escaped

    def unstructured(self) -> Question:
        body = json.loads(self.content)
        body.pop("response_format")
        return Question(_json(body))


class Reply(BaseModel):
    """A judge's whole reply; `top_logprobs` are of its first token, most likely first, where they were asked for."""

    model_config = ConfigDict(frozen=True)

    text: str
    finish_reason: str | None = None
    top_logprobs: list[tuple[str, float]] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_completion(body: str) -> Reply:
    """The reply in a server's JSON.

    Raises:
        RewardError: when it is no chat completion.
    """
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        message, usage = choice["message"], completion.get("usage") or {}
        return Reply(
            text=message.get("content") or message.get("refusal") or "",
            finish_reason=choice.get("finish_reason"),
            top_logprobs=_first_token(choice),
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RewardError(f"what the server sent is no chat completion: {body[:200]!r}") from error


def _first_token(choice: dict[str, Any]) -> list[tuple[str, float]] | None:
    tokens = (choice.get("logprobs") or {}).get("content")
    if not tokens:
        return None
    return [(each["token"], each["logprob"]) for each in tokens[0].get("top_logprobs") or ()]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
