"""The verdict whether a model looks at the image, from its losses with other and grey images: yes, no or undecided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlmrm.evaluation.report.checkpoints import number, percent, points
from vlmrm.measures.interventions import INTERVENTIONS

COUNTS = 0.05  # of accuracy: a larger loss counts, a smaller one counts as none
PROMPTS = 20  # with fewer, intervals of resampled prompts are too narrow for a verdict
CHANCE = 0.5

SWAPPED, GREY = "under another row's image", "with every picture painted grey"


class SightVerdict(NamedTuple):
    """The verdict, with its sentence; `looks` is None if it is undecided."""

    looks: bool | None
    sentence: str


class _Loss(NamedTuple):
    """The accuracy lost under an intervention, with its 95 % interval over the prompts that it changes."""

    name: str
    condition: str
    value: float
    low: float
    high: float
    prompts: int

    @property
    def counts(self) -> bool:
        return self.low > COUNTS

    @property
    def none(self) -> bool:
        return self.low > -COUNTS and self.high < COUNTS

    @property
    def sentence(self) -> str:
        lost = f"{points(self.value)} points of accuracy ({points(self.low)} to {points(self.high)})"
        return f"{self.condition} it loses {lost}"


def verdict(figures: Mapping[str, Any]) -> SightVerdict:
    """Return the verdict from the figures of `vlmrm.measures.analysis.figures`.

    A loss is more, or less, than COUNTS if its whole 95 % interval is. *It looks* when the loss under another row's
    image is more, and that with grey is not less: grey alone may only be strange to a model. *No sign* when both are
    less, of a model above chance. Otherwise, or with fewer than PROMPTS changed prompts, *undecided*. Where all
    answers are images, which differ in their pixels alone, grey decides.
    """
    swapped = _loss(figures, "swapped_image", SWAPPED)
    grey = _loss(figures, "blank_image", GREY)
    losses = [loss for loss in (swapped, grey) if loss is not None]
    if not losses:
        return SightVerdict(
            None,
            "Whether it looks at the image was not measured: evaluate with interventions swapped_image, blank_image.",
        )
    numbers = ", ".join(loss.sentence for loss in losses)
    deciding = swapped or (grey if _answers_are_images(figures) else None)
    reason = _doubt(figures, losses, deciding, grey)
    if reason is not None:
        return SightVerdict(None, f"Whether it looks at the image is undecided: {numbers}. {reason}")
    assert deciding is not None
    if deciding.counts:
        only, remark = _from_texts([figures[f"{loss.name}_accuracy"] for loss in losses])
        return SightVerdict(True, f"It looks at the image{only}: {numbers}. {remark}")
    less = f"A loss of less than {number(100 * COUNTS, 0)} points counts as none."
    return SightVerdict(False, f"There is no sign that it looks at the image: {numbers}. {less}")


def _doubt(
    figures: Mapping[str, Any], losses: Sequence[_Loss], deciding: _Loss | None, grey: _Loss | None
) -> str | None:
    """Return why the figures do not decide; None if they do."""
    prompts = min(loss.prompts for loss in losses)
    if prompts < PROMPTS:
        images = "" if prompts == figures["prompt_count"] else " with an image"
        return f"{prompts} prompts{images} are too few to tell."
    if deciding is None:
        return "Grey may only be strange to it: evaluate with the intervention swapped_image."
    if deciding.counts:
        return "The two contradict each other." if grey is not None and grey.none else None
    accuracy = figures["accuracy_half_ties"]
    if not accuracy["low"] > CHANCE:
        return f"Its accuracy, {_interval(accuracy)}, is not above chance, so that images have nothing to take away."
    if not deciding.none:
        counts = f"From {number(100 * COUNTS, 0)} points on a loss counts"
        return f"{counts}, and the interval has less and more: more pairs would tell."
    if grey is None:
        return "No loss under another row's image is not enough: evaluate with the intervention blank_image too."
    if grey.none:
        return None
    return "Grey may only be strange to it." if grey.counts else "Grey leaves it open: more pairs would tell."


def _from_texts(altered: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return a qualification of the verdict, and a sentence, from the intervention with the highest accuracy."""
    left = max(altered, key=lambda estimate: estimate["value"])
    if left["high"] < CHANCE + COUNTS:
        return "", f"At best {_interval(left)} are left, which is no lead over chance."
    if left["low"] > CHANCE:
        return ", but not only", f"At best {_interval(left)} are left, which it has from the texts."
    return "", f"At best {_interval(left)} are left; whether from the texts or by chance is undecided."


def _loss(figures: Mapping[str, Any], name: str, condition: str) -> _Loss | None:
    estimate = figures[INTERVENTIONS[name].loss]
    if not estimate["n"]:
        return None
    low, high = estimate["low"], estimate["high"]
    if low == high:
        # Every draw is the same if every pair changes alike. Then the interval reaches to the largest share of other
        # pairs of which so many prompts show none with a probability of 2.5 %.
        unseen = 1 - 0.025 ** (1 / estimate["prompts"])
        low, high = low - unseen, high + unseen
    return _Loss(name, condition, estimate["value"], low, high, estimate["prompts"])


def _answers_are_images(figures: Mapping[str, Any]) -> bool:
    """Return whether no answer has a text, and some an image."""
    return not figures["length_baseline_accuracy"]["n"] and bool(figures["score_area_correlation"]["n"])


def _interval(estimate: Mapping[str, Any]) -> str:
    return f"{percent(estimate['value'])} ({percent(estimate['low'])} to {percent(estimate['high'])})"
