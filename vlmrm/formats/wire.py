"""The items and outcomes of the service's queue and workers, of texts, numbers and bytes; and plain pickles."""

from __future__ import annotations

import pickletools
from typing import Any, TypedDict

from vlmrm.conversation import Conversation, Outcome, Sample
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import read_sample, write_sample
from vlmrm.formats.openai import read_conversation, write_messages

COLUMNS = ("image", "video", "condition_images", "condition_videos")
VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ARGUMENTS = (
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT"),
)
MAX_OPERATIONS = 100_000  # each of a few bytes, and a Python object


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


def read_pickle(data: bytes) -> Any:
    """Return the plain data of a pickle of protocol 4 or 5, Python's since 3.8; nothing in it is run."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            name = operation.name
            if count == MAX_OPERATIONS:
                raise RowError(f"a pickle has over {MAX_OPERATIONS} operations: send fewer items at a time")
            if name in ARGUMENTS:
                stack.append(argument)
            elif name in VALUES:
                stack.append(VALUES[name])
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else {})
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "MEMOIZE":
                memo.append(stack[-1])
            elif name in ("BINGET", "LONG_BINGET") and isinstance(it := memo[int(argument or 0)], (str, bytes)):
                stack.append(it)  # a list twice could hold itself
            elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
                _fill(stack, marks.pop() if name.endswith("S") else len(stack) - (1 if name == "APPEND" else 2))
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise RowError(f"a pickle holds more than plain data ({name}), and none is unpickled here: send JSON")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise RowError("the body is no whole pickle of protocol 4 or 5") from error
    raise RowError("the body is no whole pickle of protocol 4 or 5")


def _fill(stack: list[Any], start: int) -> None:
    """Put what is on the stack from `start` into the list or dictionary below it."""
    container, content = stack[start - 1], stack[start:]
    del stack[start:]
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    else:
        container.extend(content)
