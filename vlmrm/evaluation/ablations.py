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

from vlmrm.data.irrelevant import prompts_differ
from vlmrm.data.media import image_size
from vlmrm.data.schema import Branch, Comparison, Message, Messages

GREY = (128, 128, 128)
NEAR = 64  # rows, from a multiple of it on, among which a donor is sought before doing without

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


def donor_of(comparison: Any, place: int, dataset: Any) -> Comparison | None:
    """A near row of `dataset` whose prompt differs and is of the same kind; None where there is none.

    Of the row's pair (0 and 1, 2 and 3, ...) the other, else one of its four, of its eight and so on: rows of one
    batch, where its prompt and images are computed anyway. It depends on the data set alone, not on batches and ranks.
    A row that could not be read has none.
    """
    if not isinstance(comparison, Comparison) or not comparison.prompt:
        return None
    for other in (place ^ step for step in range(1, NEAR)):
        donor = dataset[other]["comparison"] if other < len(dataset) else None
        if isinstance(donor, Comparison) and donor.prompt and prompts_differ(donor.prompt, comparison.prompt):
            return donor
    return None


def _images(messages: Messages) -> list[Any]:
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]


def _with_images(messages: Messages, change: Callable[[Any], Any]) -> list[Message]:
    def changed(part: Part) -> Part:
        return {**part, "image": change(part["image"])} if part["type"] == "image" else part

    return [{**message, "content": [changed(part) for part in message["content"]]} for message in messages]


def _grey(reference: Any) -> Image.Image:
    return Image.new("RGB", image_size(reference), GREY)
