"""Texts of clients that know no messages: a conversation that a chat template has rendered, back as its messages.

The tokens of a policy's prompt and answer, decoded, are such a text. Scored as messages it is rendered anew, by the
reward model's own template, so that a conversation has the same score whichever way it came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vlmrm.data.messages import place_media, to_messages
from vlmrm.data.schema import Message, media_references
from vlmrm.errors import RowError

# ChatML, in which Qwen's and MiMo's templates write; the last turn may be cut off.
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
SHOWN = re.compile(r"<\|vision_start\|>((?:<\|image_pad\|>)+|(?:<\|video_pad\|>)+)<\|vision_end\|>")
SPECIAL = re.compile(r"<\|[^<>|]+\|>|</?s>|<pad>|\s+")  # between turns and around them: padding


def messages_of(text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> list[Message]:
    """A rendered conversation, or one as JSON: a list of messages, or `{"messages", "images", "videos"}`.

    Args:
        images, videos: what fills the places of media, in order; an expanded one counts once.

    Raises:
        RowError: when the text is neither, does not end with an answer, or media and their places do not fit.
    """
    if text.lstrip()[:1] in ("[", "{"):
        messages, images, videos = _from_json(text, images, videos)
    else:
        messages = _from_chatml(text)
    if not all(isinstance(media, (list, tuple)) for media in (images, videos)):
        raise RowError("its images or videos are no list")
    if images or videos or any(reference is None for reference in media_references(messages)):
        messages = place_media(messages, images, videos)
    if messages[-1]["role"] != "assistant":
        raise RowError("it ends without an assistant message: there is no answer to score")
    return messages


def _from_json(text: str, images: Sequence[Any], videos: Sequence[Any]) -> tuple[Any, ...]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"it looks like JSON and is none ({error})") from error
    row = {"messages": row} if isinstance(row, list) else row
    if "messages" not in row:
        raise RowError("its JSON has no messages")
    return to_messages(row["messages"], "user"), row.get("images") or images, row.get("videos") or videos


def _from_chatml(text: str) -> list[Message]:
    turns = list(TURN.finditer(text))
    if not turns or SPECIAL.sub("", TURN.sub("", text)):
        raise RowError(
            "it is no conversation: send messages, their JSON, or what the chat template (ChatML) makes of them"
        )
    return [{"role": turn[1], "content": _parts(turn[2])} for turn in turns]


def _parts(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(SHOWN.split(text)):
        if number % 2:
            kind = "image" if "image" in piece else "video"
            parts.append({"type": kind, kind: None})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]
