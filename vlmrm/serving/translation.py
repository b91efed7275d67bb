"""The two forms of an item, each made of the other: a conversation that ends with the answer, and a sample's columns.

A request has the form of its protocol and a reward takes one of them, so every reward can be asked by every protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmrm.data.schema import Message, text_of
from vlmrm.errors import RowError
from vlmrm.rewards.built_in.vlm_reward import Wording
from vlmrm.rewards.samples import CONVERTERS
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
    """An item as columns: its own, or of its conversation `prompt`, the answer and what the prompt shows.

    An answer that is one image or video is `image` or `video`, any other is `response`. The prompt's only image is
    then `image`; several, or those beside an image that is the answer, are `condition_images`. A prompt of several
    turns stays messages.

    Raises:
        RowError: when the conversation does not end with an answer.
    """
    if "messages" not in item:
        return item
    *asked, answered = item["messages"]
    if answered["role"] != "assistant":
        raise RowError("it ends without an assistant message: there is no answer to score")
    prompt, images, videos = _text_and_media(asked)
    sample: Item = {"prompt": prompt}
    if [part["type"] for part in answered["content"]] in (["image"], ["video"]):
        [part] = answered["content"]
        sample[part["type"]] = part[part["type"]]
    else:
        sample["response"] = text_of([answered])
    for kind, media in (("image", images), ("video", videos)):
        if len(media) == 1 and "response" in sample:
            sample[kind] = media[0]
        elif media:
            sample[f"condition_{kind}s"] = media
    return sample


def _text_and_media(asked: Sequence[Message]) -> tuple[Any, list[Any], list[Any]]:
    """One user turn, media before text, is its text and media; any other stays messages."""
    if len(asked) == 1 and asked[0]["role"] == "user" and asked[0]["content"]:
        *shown, text = asked[0]["content"]
        if text["type"] == "text" and all(part["type"] != "text" for part in shown):
            images, videos = ([part[kind] for part in shown if part["type"] == kind] for kind in ("image", "video"))
            return text["text"], images, videos
    return list(asked), [], []


def _picture(name: str, value: Any) -> Any:
    """Arrays, which no conversation can hold, as PIL images."""
    if isinstance(value, list):
        return [_picture(PARTS[name], one) for one in value]
    return CONVERTERS[name, False](value) if isinstance(value, np.ndarray) else value
