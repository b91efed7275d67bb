"""Any published spelling of a conversation → the one form of `vlmrm.data.schema`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlmrm.data.schema import Message
from vlmrm.errors import RowError

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}
HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


def to_messages(value: Any, role: str) -> list[Message]:
    """A string (one message of `role`), one message, or a list of messages → messages with content parts.

    Understands OpenAI parts (`image_url`, `video_url`), Hugging Face parts (`image`, `video`, `url`, `path`) and
    ShareGPT's `from` / `value`.

    Raises:
        RowError: when the value is none of these.
    """
    if isinstance(value, str):
        return [{"role": role, "content": [{"type": "text", "text": value}]}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise RowError(f"expected a text or a list of messages for the {role}, got {_short(value)}")
    return [_to_message(message, role) for message in value]


def hh_turns(value: Any) -> Any:
    """Return a text that spells out its turns as Anthropic's HH data do as messages; anything else as it is.

    "\\n\\nHuman: Hello\\n\\nAssistant:", as a prompt ends, has no turn of the assistant yet.
    """
    if not isinstance(value, str):
        return value
    text = "\n\n" + value.lstrip() if value.lstrip().startswith("Human:") and "\n\nAssistant:" in value else value
    if not text.startswith(("\n\nHuman:", "\n\nAssistant:")):
        return value
    _, *pieces = HH_TURN.split(text.rstrip())
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    messages = [{"role": "user" if name == "Human" else "assistant", "content": said.strip()} for name, said in turns]
    unanswered = len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}
    return messages[:-1] if unanswered else messages


def _to_message(message: Any, role: str) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"a message must be an object with `role` and `content`, got {_short(message)}")
    name = message.get("role") or message.get("from") or role
    if not isinstance(name, str):
        raise RowError(f"the role of a message must be a text, got {_short(name)}")
    content = message.get("content")
    if content is None:
        content = message.get("value")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RowError(f"the content of a {name} message must be a text or a list of parts, got {_short(content)}")
    return {"role": ROLES.get(name, name), "content": [_to_part(part) for part in content]}


def _to_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise RowError(f"a content part must be a text or an object, got {_short(part)}")
    # A table gives every part every column: the absent ones are None.
    part = {key: value for key, value in part.items() if value is not None}
    for kind in ("image", "video"):
        for key in (kind, f"{kind}_url"):
            if key in part:
                reference = part[key]
                if isinstance(reference, dict) and "url" in reference:
                    reference = reference["url"]
                options = {k: v for k, v in part.items() if k not in ("type", key)}
                return {**options, "type": kind, kind: reference}
        if part.get("type") == kind:
            reference = next((part[key] for key in ("url", "path", "base64") if key in part), None)
            return {"type": kind, kind: reference}  # None: filled by `place_media` from the row's media column
    if "text" in part:
        if not isinstance(part["text"], str):
            raise RowError(f"the text of a content part must be a text, got {_short(part['text'])}")
        return {"type": "text", "text": part["text"]}
    raise RowError(f"a content part must hold text, an image or a video, got {_short(part)}")


def place_media(messages: Sequence[Message], images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> list[Message]:
    """Puts a row's `images` and `videos` where the messages ask for them.

    They fill, in order, parts of their kind without a reference and the placeholders `<image>` and `<video>` in user
    texts. Media that no placeholder asks for come first in the first user message, as TRL does it. Of a kind that the
    row has none of, a placeholder is text like any other: people ask what `<image>` means in HTML.

    Raises:
        RowError: when there are more places than media, or places for only some of them.
    """
    waiting = {"image": list(images), "video": list(videos)}
    placed = {"image": 0, "video": 0}
    tags = {PLACEHOLDERS[kind]: kind for kind, media in waiting.items() if media}
    pattern = re.compile(f"({'|'.join(tags)})")

    def take(kind: str) -> dict[str, Any]:
        if not waiting[kind]:
            given = placed[kind]
            raise RowError(f"the text asks for more {kind}s than the row has ({given}): check its `{kind}s` column")
        placed[kind] += 1
        return {"type": kind, kind: waiting[kind].pop(0)}

    filled = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message["content"]:
            kind = part["type"]
            if kind != "text":
                content.append(take(kind) if part[kind] is None else part)
            elif tags and message["role"] != "assistant" and pattern.search(part["text"]):
                for piece in pattern.split(part["text"]):
                    if piece in tags:
                        content.append(take(tags[piece]))
                    elif piece:
                        content.append({"type": "text", "text": piece})
            else:
                content.append(part)
        filled.append({**message, "content": content})

    left = [{"type": kind, kind: reference} for kind, refs in waiting.items() for reference in refs]
    if left:
        if any(placed[part["type"]] for part in left):
            kind = left[0]["type"]
            raise RowError(f"the row has {len(waiting[kind])} more {kind}(s) than its text has places for")
        user = next((message for message in filled if message["role"] == "user"), None)
        if user is None:
            raise RowError("the row has images but no user message to show them in")
        user["content"] = left + user["content"]
    return filled


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
