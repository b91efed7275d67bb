"""The items and outcomes that the service's queue and workers exchange, of texts, numbers and bytes."""

from __future__ import annotations

from typing import Any, TypedDict

from vlmrm.conversation import Conversation, Outcome, Sample
from vlmrm.formats.flow_factory import read_sample, write_sample
from vlmrm.formats.openai import read_conversation, write_messages

COLUMNS = ("image", "video", "condition_images", "condition_videos")


class Item(TypedDict, total=False):
    """An item to score: `messages`, or the columns of a sample. Media are `{"bytes"}`, arrays `{"npy"}`."""

    messages: list[dict[str, Any]]
    prompt: Any
    response: Any
    image: Any
    video: Any
    condition_images: list[Any]
    condition_videos: list[Any]
    metadata: dict[str, Any]  # further input of a reward
    latents: Any  # of a video that is not decoded yet
    fps: float
    request: dict[str, Any]  # cosmos-rl's, for its handlers
    group: str | int | None


class WireOutcome(TypedDict, total=False):
    """A worker's answer about an item: `score` or `error`, and further output of the reward under `extra`."""

    score: float
    error: str
    extra: dict[str, Any]
    decode_seconds: float


def write_outcome(outcome: Outcome) -> WireOutcome:
    """Write an outcome without its default values; `read_outcome` restores them."""
    written: WireOutcome = {"error": outcome.error or ""} if outcome.score is None else {"score": outcome.score}
    if outcome.extra:
        written["extra"] = dict(outcome.extra)
    if outcome.decode_seconds:
        written["decode_seconds"] = outcome.decode_seconds
    return written


def read_outcome(outcome: WireOutcome) -> Outcome:
    """Return the outcome; raise RowError for one that is neither a score nor an error."""
    return Outcome(**outcome)


def write_item(content: Conversation | Sample, group: str | int | None = None) -> Item:
    """Write a conversation or sample as an item; `read_item` reads it back."""
    if isinstance(content, Conversation):
        return {"messages": _with_bytes(write_messages(content.messages)), "group": group}
    columns: Any = write_sample(content)
    for name in ("prompt", "response"):
        if isinstance(columns.get(name), list):
            columns[name] = _with_bytes(columns[name])
    columns |= {name: _write(columns[name]) for name in COLUMNS if name in columns}
    return {**columns, "group": group}


def read_item(item: Item) -> Conversation | Sample:
    """Return the conversation or the sample that an item is."""
    return read_conversation(item["messages"]) if "messages" in item else read_sample(item)


def _with_bytes(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for part in (part for message in messages for part in message["content"]):
        if part["type"] != "text":
            part[part["type"]] = _write(part[part["type"]])
    return messages


def _write(reference: Any) -> Any:
    if isinstance(reference, (list, tuple)):
        return [*map(_write, reference)]
    return {"bytes": bytes(reference)} if isinstance(reference, (bytes, bytearray, memoryview)) else reference
