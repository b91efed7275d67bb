"""Anthropic's HH texts, which spell out their turns: "\\n\\nHuman: Hello\\n\\nAssistant: Hi"."""

from __future__ import annotations

import re
from typing import Any

from vlmrm.conversation import Message, Messages
from vlmrm.formats.openai import read_messages

TURN = re.compile(r"\n\n(Human|Assistant): ?")


def read_prompt(value: Any) -> Messages:
    """Return a prompt as messages: a text that spells out its turns as those, on every route; no messages as none.

    Raises:
        RowError: as `read_messages` does.
    """
    if isinstance(value, (list, tuple)) and not value:
        return ()
    return read_turns(value) or read_messages(value, "user")


def read_turns(value: Any) -> Messages | None:
    """Return the turns of such a text; None for anything else.

    A prompt ends with "\\n\\nAssistant:", where the assistant has not said anything yet.
    """
    if not isinstance(value, str):
        return None
    text = "\n\n" + value.lstrip() if value.lstrip().startswith("Human:") and "\n\nAssistant:" in value else value
    if not text.startswith(("\n\nHuman:", "\n\nAssistant:")):
        return None
    _, *pieces = TURN.split(text.rstrip())
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    messages = tuple(Message.of("user" if name == "Human" else "assistant", turn.strip()) for name, turn in turns)
    unanswered = len(messages) > 1 and messages[-1] == Message.of("assistant", "")
    return messages[:-1] if unanswered else messages
