"""The two forms of an item, each made of the other: a conversation that ends with the answer, and a sample's columns.

A request has the form of its protocol and a reward takes one of them, so every reward can be asked by every protocol.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vlmrm.data.schema import Message
from vlmrm.errors import RowError
from vlmrm.rewards import samples
from vlmrm.rewards.built_in.vlm_reward import Wording
from vlmrm.serving.jobs import Item

COLUMNS = ("prompt", "image", "video", "condition_images", "condition_videos", "response")
PARTS = {"video": "image", "condition_images": "image", "condition_videos": "video"}  # what a list of it holds


def conversation_of(item: Item, wording: Wording) -> list[Message]:
    """An item as messages: its own, or what `wording` makes of its columns.

    Raises:
        RowError: when it has neither an answer, or two of them.
    """
    if "messages" in item:
        return item["messages"]
    if "prompt" not in item:
        raise RowError("it has neither messages nor a prompt")
    return wording.conversation(*(_picture(name, item.get(name)) for name in COLUMNS))


def sample_of(item: Item) -> Item:
    """An item as columns: its own, or those of its conversation.

    Raises:
        RowError: when the conversation does not end with an answer.
    """
    return samples.sample_of(item["messages"]) if "messages" in item else item


def _picture(name: str, value: Any) -> Any:
    """Arrays, which no conversation can hold, as PIL images."""
    if name not in samples.MEDIA:
        return value
    if isinstance(value, list):
        return [_picture(PARTS[name], one) for one in value]
    return samples.CONVERTERS[name, False](value) if isinstance(value, np.ndarray) else value
