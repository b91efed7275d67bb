"""Interventions: comparisons with one thing changed, to see what a model's preference rests on.

Each is declared once, in INTERVENTIONS; what is scored, the columns of the scored pairs, the metrics, the report and
the guide all read it from there. An intervention returns a comparison with as many answers in the same order (but for
the family `order`), to be scored beside the original, or None where it does not apply. They are pure functions of the
comparison and its donors, other comparisons of the data set (see `donors_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal, TypeAlias

from PIL import Image

from vlmrm.conversation import Comparison, Message, Messages, Part, Reference, media_of
from vlmrm.conversation import Image as ImagePart
from vlmrm.data.media import image_size
from vlmrm.errors import ConfigError, RowError
from vlmrm.settings import nearest

logger = logging.getLogger("vlmrm")

Donors: TypeAlias = Sequence[Comparison]
Change: TypeAlias = Callable[[Comparison, Donors], Comparison | None]
Family: TypeAlias = Literal["image", "question", "prompt", "frames", "quality", "style", "order"]

# Under the first four, a model that uses what is gone loses accuracy; under the others it should lose none.
FAMILIES: Mapping[Family, str] = {
    "image": "images and videos blank or exchanged",
    "question": "the question alone exchanged or left out",
    "prompt": "question and images together exchanged or left out",
    "frames": "the frames of videos in another order, or one for all",
    "quality": "images a little degraded",
    "style": "texts reworded or decorated, with the same meaning",
    "order": "the answers in another order, for scorers that see all of them at once",
}
REMOVING: tuple[Family, ...] = ("image", "question", "prompt", "frames")


@dataclass(frozen=True)
class Intervention:
    """A change of a comparison, and how the metrics and the report call it.

    Attributes:
        change: a function of the comparison and its donors.
        view: what the model saw, in the report.
        condition: completes "accuracy ...".
        attack: the margin that counts is that of the chosen answer as it is over the rejected one changed:
            decorating the rejected answer should not make it win.
        repeats: the intervention of which this is another donor or neutral picture; their credits are averaged.
        sampled: scored on a sample of the comparisons alone.
        standard: scored unless the key `interventions` names others.
        loss: the metric of the accuracy that is lost under it; by default made from the name.
    """

    name: str
    change: Change
    family: Family
    view: str
    condition: str
    attack: bool = False
    repeats: str | None = None
    sampled: bool = True
    standard: bool = False
    loss: str = field(default="")

    def __post_init__(self):
        if not self.loss:
            object.__setattr__(self, "loss", f"{self.name}_{'reliance' if self.removes else 'loss'}")

    @property
    def removes(self) -> bool:
        """Whether a part is removed or exchanged, so that a model that uses it loses accuracy, as it should."""
        return self.family in REMOVING

    def __call__(self, comparison: Comparison, donors: Donors = ()) -> Comparison | None:
        """Return the changed comparison, None where the change does not apply."""
        return self.change(comparison, donors)

    def in_branches(self, scores: Sequence[float]) -> list[float]:
        """Return scores of the changed comparison's answers in the order of the original ones."""
        return list(reversed(scores)) if self.family == "order" else list(scores)


def blank_image(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
    """Paint every image grey at its own size: a model that looks loses its preference."""
    if not any(map(_images, (comparison.prompt, *comparison.answers))):
        return None
    return replace(
        comparison,
        prompt=_with_images(comparison.prompt, _grey),
        answers=tuple(_with_images(answer, _grey) for answer in comparison.answers),
    )


def swapped_image(comparison: Comparison, donors: Donors, number: int = 0) -> Comparison | None:
    """Ask the question about the donor's images: a model that looks should find neither answer better."""
    if len(donors) <= number or not _images(comparison.prompt) or not _images(donors[number].prompt):
        return None
    images = cycle(_images(donors[number].prompt))
    return replace(comparison, prompt=_with_images(comparison.prompt, lambda image: next(images)))


def swapped_prompt(comparison: Comparison, donors: Donors) -> Comparison | None:
    """Put the answers under the donor's prompt, question and images at once, where neither should win."""
    if not donors or not comparison.prompt or not donors[0].prompt:
        return None
    return replace(comparison, prompt=donors[0].prompt)


def response_only(comparison: Comparison, donors: Donors = ()) -> Comparison | None:
    """Leave out the prompt: a preference that remains does not depend on the question."""
    return replace(comparison, prompt=()) if comparison.prompt else None


def _grey(reference: Reference) -> Image.Image:
    return Image.new("RGB", image_size(reference), GREY)


def _images(messages: Messages) -> list[Reference | None]:
    return [medium.reference for medium in media_of(messages) if isinstance(medium, ImagePart)]


def _with_images(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    def changed(part: Part) -> Part:
        return ImagePart(change(part.reference)) if isinstance(part, ImagePart) else part

    return tuple(Message(message.role, tuple(map(changed, message.content))) for message in messages)


GREY = (128, 128, 128)


def _second_donor(comparison: Comparison, donors: Donors) -> Comparison | None:
    return swapped_image(comparison, donors, 1)


_DECLARED = (
    Intervention(
        "blank_image",
        blank_image,
        "image",
        "images painted grey",
        "with every image painted grey",
        standard=True,
        loss="image_reliance",
    ),
    Intervention(
        "swapped_image",
        swapped_image,
        "image",
        "another row's image",
        "with the images of another row",
        standard=True,
    ),
    Intervention(
        "swapped_image_again",
        _second_donor,
        "image",
        "a third row's image",
        "with the images of a third row",
        repeats="swapped_image",
        standard=True,
    ),
    Intervention(
        "swapped_prompt",
        swapped_prompt,
        "prompt",
        "another question and image",
        "under the prompt of another row",
        standard=True,
    ),
    Intervention(
        "response_only",
        response_only,
        "prompt",
        "no prompt at all",
        "of the answers alone",
        sampled=False,
        standard=True,
    ),
)
# By name. Plain, so that a test can add one.
INTERVENTIONS: dict[str, Intervention] = {intervention.name: intervention for intervention in _DECLARED}
GROUPS = ("standard", "all", "none", *FAMILIES)  # words of the key `interventions` beside the names


def named(words: Iterable[str]) -> list[str]:
    """Return the names that the key `interventions` means: names, families, `standard`, `all` or `none`.

    Raises:
        ConfigError: for another word, with the nearest name.
    """
    wanted: set[str] = set()
    for word in words:
        if word not in INTERVENTIONS and word not in GROUPS:
            near = nearest(word, [*INTERVENTIONS, *GROUPS])
            mean = f"did you mean {near}? Choose" if near else "choose"
            raise ConfigError(
                f"interventions names {word!r}: {mean} from {', '.join(GROUPS)}, {', '.join(INTERVENTIONS)}."
            )
        wanted |= {
            name
            for name, intervention in INTERVENTIONS.items()
            if word in (name, intervention.family, "all") or (word == "standard" and intervention.standard)
        }
    return [name for name in INTERVENTIONS if name in wanted]


def alterations(
    comparison: Comparison,
    donors: Donors,
    interventions: Iterable[Intervention],
    *,
    sampled: bool = True,
    together: bool = False,
) -> Iterator[tuple[Intervention, Comparison]]:
    """Yield the interventions that apply to a comparison, with the changed comparison.

    Args:
        sampled: whether the comparison is in the sample of those that run on one alone.
        together: whether the scorer sees all answers at once, so that their order may matter to it.
    """
    for intervention in interventions:
        if (intervention.sampled and not sampled) or (intervention.family == "order" and not together):
            continue
        try:
            changed = intervention(comparison, donors)
        except RowError as error:  # an image of the donor, or of the row, whose own scoring says so
            logger.debug("row %s has no %s: %s", comparison.id, intervention.name, error)
            continue
        if changed is not None:
            yield intervention, changed
