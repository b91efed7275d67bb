"""Comparisons with something taken away or exchanged, to see what a model's preference rests on.

Each ablation makes a comparison with the same branches, to be scored beside the original; None where it means nothing.
`donor` is another comparison of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

from PIL import Image

from vlmrm.data.media import image_size
from vlmrm.data.schema import Branch, Comparison, Message, Messages

GREY = (128, 128, 128)

Ablation = Callable[[Comparison, Comparison | None], Comparison | None]
Part = dict[str, Any]


def blank_image(comparison: Comparison, donor: Comparison | None = None) -> Comparison | None:
    """Every image painted grey at its own size: a model that looks loses its preference."""
    messages = [comparison.prompt, *(branch.messages for branch in comparison.branches)]
    if not any(part["type"] == "image" for some in messages for message in some for part in message["content"]):
        return None
    return replace(
        comparison,
        prompt=_with_images(comparison.prompt, _grey),
        branches=[Branch(_with_images(branch.messages, _grey), branch.rating) for branch in comparison.branches],
    )


def swapped_image(comparison: Comparison, donor: Comparison | None) -> Comparison | None:
    """The question about the donor's images: the chosen answer, true of the right image, should lose its lead."""
    if donor is None or not _images(comparison.prompt) or not _images(donor.prompt):
        return None
    others = cycle(_images(donor.prompt))
    return replace(comparison, prompt=_with_images(comparison.prompt, lambda image: next(others)))


def swapped_prompt(comparison: Comparison, donor: Comparison | None) -> Comparison | None:
    """The answers under the donor's prompt, images included, where neither should win."""
    if donor is None or not comparison.prompt or not donor.prompt:
        return None
    return replace(comparison, prompt=donor.prompt)


def response_only(comparison: Comparison, donor: Comparison | None = None) -> Comparison | None:
    """The answers without any prompt: what is still preferred is preferred whatever was asked."""
    return replace(comparison, prompt=[]) if comparison.prompt else None


ABLATIONS: Mapping[str, Ablation] = {
    "blank_image": blank_image,
    "swapped_image": swapped_image,
    "swapped_prompt": swapped_prompt,
    "response_only": response_only,
}


def _images(messages: Messages) -> list[Any]:
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]


def _with_images(messages: Messages, change: Callable[[Any], Any]) -> list[Message]:
    def changed(part: Part) -> Part:
        return {**part, "image": change(part["image"])} if part["type"] == "image" else part

    return [{**message, "content": [changed(part) for part in message["content"]]} for message in messages]


def _grey(reference: Any) -> Image.Image:
    return Image.new("RGB", image_size(reference), GREY)
