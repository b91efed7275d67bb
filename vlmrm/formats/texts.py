"""Conversations written as one text: ChatML, as the chat templates of Qwen and MiMo write it, JSON, and HH's turns.

The decoded tokens of a policy's prompt and answer are ChatML. Parsed into messages, they are rendered again by the
reward model's own template, so that a conversation has the same score on every route.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmrm.conversation import ROLES, Conversation, Image, Message, Messages, Part, Text, Video, media_of
from vlmrm.errors import RowError
from vlmrm.formats.openai import KINDS, read_messages, read_reference

# Media in columns of their own, filled in at `<image>` and `<video>`, or in parts without a reference.

JSON_VALUES = 200_000  # in one text
PLACEHOLDERS = {"image": "<image>", "video": "<video>"}


def fill(messages: Sequence[Message], images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Messages:
    """Return the messages with images and videos filled in.

    They fill, in order, the parts of their kind without a reference; if there are none, the placeholders `<image>`
    and `<video>` in texts of any role but the assistant. Media without any slot come first in the first user message,
    as in TRL. A row without media, or with parts for them, keeps placeholders as text: people ask what `<image>`
    means in HTML.
    """
    given = {"image": [*map(read_reference, images)], "video": [*map(read_reference, videos)]}
    empty = {medium.kind for medium in media_of(messages) if medium.reference is None}
    tags = {PLACEHOLDERS[kind]: kind for kind, media in given.items() if media and kind not in empty}

    def slotted(message: Message) -> Message:
        if not tags or message.role == "assistant":
            return message
        parts: list[Part] = []
        for part in message.content:
            pieces = re.split(f"({'|'.join(tags)})", part.text) if isinstance(part, Text) else []
            split = [KINDS[tags[it]]() if it in tags else Text(it) for it in pieces if it]
            parts += split if len(pieces) > 1 else [part]
        return Message(message.role, tuple(parts))

    filled = [*map(slotted, messages)]
    unplaced: list[Part] = []
    for kind, media in given.items():
        slots = sum(medium.kind == kind and medium.reference is None for medium in media_of(filled))
        if slots > len(media):
            raise RowError(f"the text asks for more {kind}s than the row has ({len(media)}): check `{kind}s`")
        if slots and slots < len(media):
            raise RowError(f"the row has {len(media) - slots} more {kind}(s) than its text has places for")
        unplaced += [] if slots else map(KINDS[kind], media)
    remaining = {kind: iter(media) for kind, media in given.items()}

    def taken(part: Part) -> Part:
        if isinstance(part, Text) or part.reference is not None:
            return part
        return replace(part, reference=next(remaining[part.kind]))

    filled = [Message(message.role, tuple(map(taken, message.content))) for message in filled]
    if unplaced:
        first = next((index for index, message in enumerate(filled) if message.role == "user"), None)
        if first is None:
            raise RowError("the row has images but no user message to show them in")
        filled[first] = Message("user", (*unplaced, *filled[first].content))
    return tuple(filled)


def refuse_lost_media(prompt: Any, filled: Sequence[Message]) -> None:
    """Refuse a prompt that says `<image>` or `<video>` and shows none: its score would be of another question.

    An answer may say so, and a part of a message: only a text, and content that is one, has places in it. `filled` are
    the messages of the prompt with all media of its row.
    """
    if isinstance(prompt, str):
        texts = [message.text for message in filled if message.role != "assistant"]
    else:
        turns = zip([prompt] if isinstance(prompt, Mapping) else prompt, filled, strict=False)
        asked = [turn for turn, message in turns if isinstance(turn, Mapping) and message.role != "assistant"]
        texts = [text for turn in asked for text in (turn.get("content"), turn.get("value")) if isinstance(text, str)]
    shown = {medium.kind for medium in media_of(filled)}
    for kind, tag in PLACEHOLDERS.items():
        if kind not in shown and any(tag in text for text in texts):
            raise RowError(
                f"its prompt says {tag} and the row has no {kind}: look whether its column of {kind}s is missing, "
                "empty or called otherwise; words that mean no place belong into a text part of a message"
            )


TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)  # the last may be cut off
MEDIUM = re.compile(r"<\|vision_start\|>((?:<\|image_pad\|>)+|(?:<\|video_pad\|>)+)<\|vision_end\|>")
HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
SPECIAL = re.compile(r"<\|[^<>|]+\|>|</?s>|<pad>|\s+")  # between turns and around them: padding


def read_text(text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Conversation:
    """Return the conversation in ChatML, or in JSON: a list of messages, or `{"messages", "images", "videos"}`.

    `images` and `videos` are for the media tokens of the text, in order; an expanded run of pads is one.
    """
    if text.lstrip()[:1] in ("[", "{"):
        messages, images, videos = _from_json(text, images, videos)
    else:
        messages = _from_chatml(text)
    if not all(isinstance(media, (list, tuple)) for media in (images, videos)):
        raise RowError("its images or its videos are not a list: write a list")
    # `fill` reports slots without media; without either, `<image>` in a text is just text.
    if images or videos or any(medium.reference is None for medium in media_of(messages)):
        messages = fill(messages, images, videos)
    conversation = Conversation(messages)
    _ = conversation.answer
    return conversation


def load_json(text: str) -> Any:
    """Return the JSON in a text of a row."""
    if text.count(",") + text.count("[") + text.count("{") > JSON_VALUES:
        raise ValueError(f"over {JSON_VALUES} values")
    return json.loads(text)


def _from_json(text: str, images: Sequence[Any], videos: Sequence[Any]) -> tuple[Messages, Any, Any]:
    try:
        row = load_json(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"it looks like JSON but is not valid ({error})") from error
    row = {"messages": row} if isinstance(row, list) else row
    if "messages" not in row:
        raise RowError("its JSON has no messages")
    return read_messages(row["messages"], "user"), row.get("images") or images, row.get("videos") or videos


def _from_chatml(text: str) -> Messages:
    turns = list(TURN.finditer(text))
    if not turns or SPECIAL.sub("", TURN.sub("", text)):
        raise RowError("it is no conversation: send messages, their JSON, or their text in a chat template (ChatML)")
    return tuple(Message(ROLES.get(turn[1], turn[1]), _read_content(turn[2])) for turn in turns)


def _read_content(text: str) -> tuple[Part, ...]:
    parts: list[Part] = []
    for index, piece in enumerate(MEDIUM.split(text)):
        if index % 2:
            parts.append(Image() if "image" in piece else Video())
        elif piece:
            parts.append(Text(piece))
    return tuple(parts) or (Text(""),)


def read_prompt(value: Any) -> Messages:
    """Return a prompt as messages: the turns of an HH text, else as `read_messages`; an empty list stays empty."""
    if isinstance(value, (list, tuple)) and not value:
        return ()
    return read_hh_turns(value) or read_messages(value, "user")


def read_hh_turns(value: Any) -> Messages | None:
    """Return the turns of a text of Anthropic's HH data, such as "\\n\\nHuman: Hello\\n\\nAssistant: Hi".

    A prompt there ends with "\\n\\nAssistant:", which adds no turn. Return None for any other value.
    """
    if not isinstance(value, str):
        return None
    text = "\n\n" + value.lstrip() if value.lstrip().startswith("Human:") and "\n\nAssistant:" in value else value
    if not text.startswith(("\n\nHuman:", "\n\nAssistant:")):
        return None
    _, *pieces = HH_TURN.split(text.rstrip())
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    messages = tuple(Message.of("user" if name == "Human" else "assistant", turn.strip()) for name, turn in turns)
    unanswered = len(messages) > 1 and messages[-1] == Message.of("assistant", "")
    return messages[:-1] if unanswered else messages
