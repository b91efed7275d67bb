"""OpenAI's messages, also with Hugging Face's parts or ShareGPT's keys: the form that people and clients write."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrm.conversation import (
    ROLES,
    Conversation,
    Image,
    Message,
    Messages,
    Part,
    Text,
    Video,
    VideoOptions,
    shorten,
    text_of,
    with_article,
)
from vlmrm.errors import RowError
from vlmrm.settings import nearest

KINDS: dict[str, type[Image] | type[Video]] = {"image": Image, "video": Video}
MEDIA_KEYS = [key for kind in KINDS for key in (kind, f"{kind}_url")]
SOURCE_KEYS = ("url", "path", "base64")  # hold the reference of a part whose kind is its `type`
OPTIONS = [option.name for option in dataclasses.fields(VideoOptions)]
# Content outside of `content`, which is refused; any further key (ids, times, ms-swift's loss) is metadata.
REFUSED_IN_MESSAGE = (
    *("tool_calls", "function_call", "audio", "refusal", "reasoning", "reasoning_content", "thinking"),
    *("images", "image", "videos", "video", "text"),
)
REFUSED_IN_PART = ("audio", "input_audio", "audio_url")


def read_conversation(value: Conversation | Sequence[Any]) -> Conversation:
    """Return a list of messages as a Conversation; a Conversation stays one."""
    if isinstance(value, Conversation):
        return value
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise RowError(f"it is a single {type(value).__name__}: a conversation is a list of messages")
    return Conversation(read_messages(value, "user"))


def read_messages(value: Any, role: str) -> Messages:
    """Return a text (one message of `role`), a message or a list of messages, as messages.

    Understands OpenAI's parts (`image_url`, `video_url`), Hugging Face's (`image`, `video`, `url`, `path`) and
    ShareGPT's `from` and `value`. An image or video part without a reference is a slot for one.
    """
    if isinstance(value, str):
        return (Message.of(role, value),)
    if isinstance(value, (dict, Message)):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise RowError(f"expected a text or a list of messages for the {role}, got {shorten(value)}")
    return tuple(message if isinstance(message, Message) else _read_message(message, role) for message in value)


def answer_text(answer: Any) -> str:
    """Return the text of an answer: a text, or messages."""
    return answer if isinstance(answer, str) else text_of(read_messages(answer, "assistant"))


def write_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Write messages as dictionaries with Hugging Face's parts; `read_messages` reads them back."""
    return [{"role": message.role, "content": [*map(_write_part, message.content)]} for message in messages]


def _read_message(message: Any, role: str) -> Message:
    if not isinstance(message, Mapping):
        raise RowError(f"a message must be an object with `role` and `content`, got {shorten(message)}")
    name = message.get("role") or message.get("from") or role
    if not isinstance(name, str):
        raise RowError(f"the role of a message must be a text, got {shorten(name)}")
    if refused := [key for key in REFUSED_IN_MESSAGE if _holds(message.get(key))]:
        raise RowError(
            f"{with_article(name)} message has `{refused[0]}`, which is not read: write it into its content, or leave "
            "it out"
        )
    content = message.get("content")
    if content is None:
        content = message.get("value")
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RowError(
            f"the content of {with_article(name)} message must be a text or a list of parts, got {shorten(content)}"
        )
    return Message(ROLES.get(name, name), tuple(map(_read_part, content)))


def _read_part(part: Any) -> Part:
    if isinstance(part, (Text, Image, Video)):
        return part
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, Mapping):
        raise RowError(f"a content part must be a text or an object, got {shorten(part)}")
    # A table gives every part every column: the absent ones are None.
    part = {key: value for key, value in part.items() if value is not None}
    if refused := [key for key in REFUSED_IN_PART if _holds(part.get(key))]:
        raise RowError(f"a content part has `{refused[0]}`, which is not read: leave it out")
    text = part.get("text")
    # Beside a text, an empty media column is one that the table has for its other parts.
    keys = [key for key in MEDIA_KEYS if key in part and (not text or _holds(part[key]))]
    contents = keys or [kind for kind in KINDS if kind == part.get("type")]
    contents += ["text"] if text or (not contents and "text" in part) else []
    if not contents:
        raise RowError(f"a content part must hold text, an image or a video, got {shorten(part)}")
    if len(contents) > 1:
        raise RowError(f"a content part holds {contents[0]} and {contents[1]}: make them two parts")
    return Text(part["text"]) if contents == ["text"] else _read_medium(contents[0], part)


def _read_medium(key: str, part: Mapping[str, Any]) -> Part:
    """Return the image or video under `key`, or that of a part of this `type`; unknown keys are metadata."""
    sources = [name for name in SOURCE_KEYS if name in part]
    if key not in part:
        reference = part if "bytes" in part else part[sources[0]] if sources else None
    elif sources:
        raise RowError(f"a content part holds {key} and {sources[0]}: leave one of them out")
    elif isinstance(reference := part[key], Mapping) and "url" in reference:
        part, reference = {**part, **reference}, reference["url"]
    if key.removesuffix("_url") == "image":
        options = [name for name in ("detail", *OPTIONS) if part.get(name) not in (None, "auto")]
        if options:
            raise RowError(f"an image part has `{options[0]}`, which is not read: leave it out, or set max_pixels")
        return Image(read_reference(reference))
    options = {name: part[name] for name in OPTIONS if part.get(name) is not None}
    for name in part.keys() - options.keys():
        # A misspelled option would silently change which frames the model sees.
        if name == "detail" or nearest(name, OPTIONS, 0.8):
            raise RowError(f"a video part has `{name}`, which is not read: its options are {', '.join(OPTIONS)}")
    return Video(read_reference(reference), VideoOptions(**options))


def _holds(value: Any) -> bool:
    """Return whether a value is not empty; bool() of an array would raise."""
    return value is not None and (len(value) > 0 if hasattr(value, "__len__") else bool(value))


def read_reference(value: Any) -> Any:
    """Return the reference of an image or video: of Hugging Face's `{"bytes", "path"}` the one that is set."""
    if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
        return value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, (list, tuple)):
        return tuple(map(read_reference, value))
    return value


def _write_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Image):
        return {"type": "image", "image": part.reference}
    frames = list(part.reference) if isinstance(part.reference, tuple) else part.reference
    return {"type": "video", "video": frames, **part.options.as_dict()}
