"""Comparisons with something taken away, to see what the model's preference rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from PIL import Image

from vlmrm.data.media import open_image
from vlmrm.data.schema import Branch, Comparison, Message, Messages

GREY = (128, 128, 128)


def blank_image(comparison: Comparison) -> Comparison:
    """The same comparison with every image painted grey at its own size; videos keep their frame count."""
    return replace(
        comparison,
        prompt=_blank(comparison.prompt),
        branches=[Branch(_blank(branch.messages), branch.rating) for branch in comparison.branches],
    )


def _blank(messages: Messages) -> list[Message]:
    return [{**message, "content": [_blank_part(part) for part in message["content"]]} for message in messages]


def _blank_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        return {**part, "image": _grey(part["image"])}
    if part["type"] == "video" and isinstance(part["video"], (list, tuple)):
        return {**part, "video": [_grey(frame) for frame in part["video"]]}
    return part


def _grey(reference: Any) -> Image.Image:
    return Image.new("RGB", open_image(reference).size, GREY)
