"""The audit in words: a headline, and a sentence for each finding."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from vlmrm.evaluation.report.checkpoints import number, percent, points
from vlmrm.measures.analysis import CHANCE, MARGIN, Finding, deciding
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS, REMOVING

USES = {
    "image": "looks at the image",
    "question": "needs the question",
    "frames": "needs the order of frames",
    "prompt": "needs the prompt",
}


def headline(findings: Sequence[Finding]) -> str:
    """Return what a model's preference rests on, in as many sentences as there is something to say of.

    The prompt as a whole is left out where image or question alone were asked about.
    """
    decisive = {family: finding for family in USES if (finding := deciding(findings, family)) is not None}
    if {"image", "question"} & set(decisive):
        decisive.pop("prompt", None)
    sentences = [_on_part(family, finding) for family, finding in decisive.items()]
    swayed = [finding for finding in findings if finding.family not in REMOVING and finding.state == "reliant"]
    sentences += [f"What should not matter does: {'; '.join(map(_numbers, swayed))}."] if swayed else []
    return " ".join(sentences) or "What its preference rests on was not measured: evaluate with interventions."


def changed(finding: Finding) -> str:
    """Return what was changed, as the first cell of its row."""
    return INTERVENTIONS[finding.name].view + _of_several(finding)


def state(finding: Finding) -> str:
    """Return the finding in the words of its family: what is removed should be missed, and nothing else."""
    if finding.state == "undecided":
        return "undecided"
    counts = finding.state == "reliant"
    if finding.family in REMOVING:
        return "relies on it" if counts else "does not rely on it"
    return "swayed by it" if counts else "not swayed"


def _on_part(family: str, finding: Finding) -> str:
    uses, numbers = USES[family], _numbers(finding)
    if finding.state == "undecided":
        detected = "none" if isnan(finding.detectable) else f"one of {points(finding.detectable)}"
        reason = finding.reason or (
            f"From {number(100 * finding.margin, 0)} points on a loss counts; these pairs would show {detected}."
        )
        return f"Whether it {uses} is undecided: {numbers}. {reason}"
    if finding.state == "not reliant":
        less = f"A loss of less than {number(100 * finding.margin, 0)} points counts as none."
        return f"There is no sign that it {uses}: {numbers}. {less}"
    if finding.loss.value < 0:
        return f"It {uses}, for the worse: {numbers}."
    only, remark = _from_the_others(finding.left)
    return f"It {uses}{only}: {numbers}. {remark}"


def _from_the_others(left: Estimate) -> tuple[str, str]:
    """Return a qualification and a sentence about the accuracy that is left without the part."""
    remains = f"{percent(left.value)} ({percent(left.low)} to {percent(left.high)}) are left"
    if left.low > CHANCE:
        return ", but not only", f"{remains}, which it has from the rest."
    if left.high < CHANCE + MARGIN:
        return "", f"{remains}, which is no lead over chance."
    return "", f"{remains}; whether from the rest or by chance is undecided."


def _numbers(finding: Finding) -> str:
    loss = finding.loss
    forward = loss.value >= 0
    low, high = (loss.low, loss.high) if forward else (-loss.high, -loss.low)
    size, ends = points(abs(loss.value)), f"({points(low)} to {points(high)})"
    if finding.family == "order":
        return f"standing {'first' if forward else 'last'} is worth {size} points of accuracy {ends}"
    verb = "loses" if forward else "gains"
    condition = INTERVENTIONS[finding.name].condition + _of_several(finding)
    return f"{condition} it {verb} {size} points of accuracy {ends}"


def _of_several(finding: Finding) -> str:
    """Say of how many variants the figures are the mean: the accuracy under one of them is another."""
    return f" (mean of {finding.averaged} variants)" if finding.averaged > 1 else ""
