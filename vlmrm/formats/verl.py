"""verl's prompts: messages in which the `bytes` and `path` of an opened image stay beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrm.conversation import Messages
from vlmrm.formats import hh


def read_prompt(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return verl's `raw_prompt` as messages; raises RowError as `hh.read_prompt` does."""
    return hh.read_prompt([_without_sources(message) for message in messages])


def _without_sources(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    opened = (isinstance(part, Mapping) and part.get("image") is not None for part in content)
    parts = [{"type": "image", "image": p["image"]} if image else p for p, image in zip(content, opened, strict=True)]
    return {**message, "content": parts}
