"""Comparisons with a part removed or exchanged, to see what a model's preference rests on.

Each intervention returns a comparison with the same answers, to be scored beside the original, or None where it does
not apply. `donor` is another comparison of the data set.
"""

from __future__ import annotations

import filecmp
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

from PIL import Image

from vlmrm.conversation import Comparison, Message, Messages, Part, Reference, media_of, text_of
from vlmrm.conversation import Image as ImagePart
from vlmrm.data.media import image_size, media_key
from vlmrm.errors import MediaError

GREY = (128, 128, 128)
# Sizes of the blocks of rows in which a donor is looked for, one after another: the first is that of a batch.
BLOCKS = (8, 16, 32, 64)


def blank_image(comparison: Comparison, donor: Comparison | None = None) -> Comparison | None:
    """Paint every image grey at its own size: a model that looks loses its preference."""
    if not any(map(_images, (comparison.prompt, *comparison.answers))):
        return None
    return replace(
        comparison,
        prompt=_with_images(comparison.prompt, _grey),
        answers=tuple(_with_images(answer, _grey) for answer in comparison.answers),
    )


def swapped_image(comparison: Comparison, donor: Comparison | None) -> Comparison | None:
    """Ask the question about the donor's images: a model that looks should find neither answer better."""
    if donor is None or not _images(comparison.prompt) or not _images(donor.prompt):
        return None
    images = cycle(_images(donor.prompt))
    return replace(comparison, prompt=_with_images(comparison.prompt, lambda image: next(images)))


def swapped_prompt(comparison: Comparison, donor: Comparison | None) -> Comparison | None:
    """Put the answers under the donor's prompt, question and images at once, where neither should win."""
    if donor is None or not comparison.prompt or not donor.prompt:
        return None
    return replace(comparison, prompt=donor.prompt)


def response_only(comparison: Comparison, donor: Comparison | None = None) -> Comparison | None:
    """Leave out the prompt: a preference that remains does not depend on the question."""
    return replace(comparison, prompt=()) if comparison.prompt else None


@dataclass(frozen=True)
class Intervention:
    """A change of a comparison, by its name in INTERVENTIONS, and how the metrics and the report call it.

    Attributes:
        change: one of the functions above.
        condition: completes "accuracy ...".
        view: what the model saw, in the report.
        reliance: the metric of the accuracy that is lost under it.
    """

    change: Callable[[Comparison, Comparison | None], Comparison | None]
    condition: str
    view: str
    reliance: str

    def __call__(self, comparison: Comparison, donor: Comparison | None = None) -> Comparison | None:
        return self.change(comparison, donor)


INTERVENTIONS: Mapping[str, Intervention] = {
    "blank_image": Intervention(blank_image, "with every image painted grey", "images painted grey", "image_reliance"),
    "swapped_image": Intervention(
        swapped_image, "with the images of another row", "another row's image", "swapped_image_reliance"
    ),
    "swapped_prompt": Intervention(
        swapped_prompt, "under the prompt of another row", "another question and image", "swapped_prompt_reliance"
    ),
    "response_only": Intervention(response_only, "of the answers alone", "no prompt at all", "response_only_reliance"),
}


class Traits(NamedTuple):
    """The properties of a row that decide which rows it may be a donor of; small enough to keep for many rows."""

    has_media: bool  # in the prompt
    question: str
    answers: frozenset[str]
    pictures: frozenset[str]  # of prompt and answers


def traits_of(comparison: Any) -> Traits | None:
    """Return what `donor_of` compares; None for a row without a prompt, or with a medium that is no reference."""
    if not isinstance(comparison, Comparison) or not comparison.prompt:
        return None
    try:
        pictures = _pictures(comparison)
    except MediaError:
        return None  # scoring the row reports it
    has_media = bool(media_of(comparison.prompt))
    return Traits(has_media, text_of(comparison.prompt), _answers(comparison), pictures)


def donor_of(
    comparison: Any, index: int, dataset: Any, traits: dict[int, Traits | None] | None = None
) -> Comparison | None:
    """Draw a near row of `dataset` with a prompt of the same kind that is irrelevant to this row's answers.

    It shares no picture with the row, in prompt or answers. If it has the same question, it shares no answer either:
    many data sets hold a row and its mirror, the same answers about a picture for which the other one is right. Where
    every row has the same question and answers, only the pictures differ. None where there is no such row, and for a
    row that could not be read.

    The donor is row `index ^ step`, with steps in an order drawn for the block. In a block of eight, and so in a batch
    of eight, its prompt and images are computed anyway. Donors depend on the data set, not on batches or ranks.

    Args:
        traits: traits of rows by index, so that these rows are not read again; those of further rows are added.
    """
    traits = {} if traits is None else traits
    if index not in traits:
        traits[index] = traits_of(comparison)
    row_traits = traits[index]
    if row_traits is None:
        return None
    same_answers = None
    for candidate in _near(index):
        if candidate >= len(dataset):
            continue
        if candidate not in traits:
            traits[candidate] = traits_of(dataset[candidate]["comparison"])
        donor = traits[candidate]
        if donor is None or donor.has_media != row_traits.has_media:
            continue
        same_question = donor.question == row_traits.question
        if same_question and not row_traits.has_media:
            continue
        if any(_same_picture(a, b) for a in row_traits.pictures for b in donor.pictures):
            continue
        if not (same_question and donor.answers & row_traits.answers):
            return dataset[candidate]["comparison"]
        same_answers = candidate if same_answers is None else same_answers
    return None if same_answers is None else dataset[same_answers]["comparison"]


def _near(index: int) -> Iterator[int]:
    """Yield the rows of the blocks around `index`; the order of the steps is the same for all rows of a block."""
    for start, end in zip((1, *BLOCKS), BLOCKS, strict=False):
        steps = list(range(start, end))
        random.Random(f"{end}:{index // end}").shuffle(steps)
        yield from (index ^ step for step in steps)


def _pictures(comparison: Comparison) -> frozenset[str]:
    """Return the identities of the media of prompt and answers."""
    pieces = (comparison.prompt, *comparison.answers)
    return frozenset(media_key(medium.reference) for messages in pieces for medium in media_of(messages))


def _same_picture(a: str, b: str) -> bool:
    """Return whether two identities are of the same picture: a file may be a copy of another."""
    return a == b or (os.path.isfile(a) and os.path.isfile(b) and filecmp.cmp(a, b, shallow=False))


def _answers(comparison: Comparison) -> frozenset[str]:
    return frozenset(text for answer in comparison.answers if (text := text_of(answer)))


def _images(messages: Messages) -> list[Reference | None]:
    return [medium.reference for medium in media_of(messages) if isinstance(medium, ImagePart)]


def _with_images(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    def changed(part: Part) -> Part:
        return ImagePart(change(part.reference)) if isinstance(part, ImagePart) else part

    return tuple(Message(message.role, tuple(map(changed, message.content))) for message in messages)


def _grey(reference: Reference) -> Image.Image:
    return Image.new("RGB", image_size(reference), GREY)
