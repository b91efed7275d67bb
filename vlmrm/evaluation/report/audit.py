"""What the first screen says, in the same words on the page, on the card and in the terminal.

Which checkpoint to use, which are as good, four questions with their answers, and what to trust it for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

from scipy.special import stdtr

from vlmrm.evaluation.report.checkpoints import CATEGORY, Choice, interval, number, percent, points
from vlmrm.measures.analysis import CHANCE, CLUSTERS, LEVEL, MARGIN, Finding, deciding, holm
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS, REMOVING

# What a model may use: the question of its chip, and what to trust it for where it does.
PARTS = {
    "image": ("Looks at the image?", "what the image decides"),
    "question": ("Needs the question?", "what the question decides"),
    "frames": ("Needs the order of frames?", "what the order of frames decides"),
}
MOVED = 0.2  # standard deviations of an output; what moves its values by more sways it
NAMED = 4  # checkpoints or categories of a sentence
LEADS = {True: "Trust it for", False: "Not for", None: "Unknown for"}


class Chip(NamedTuple):
    """A question with its answer, the one number behind it with interval and pairs, and a remark.

    `good` is None where the data cannot tell; `about` is what to trust the model for, or not.
    """

    question: str
    answer: str
    good: bool | None
    number: str
    spread: str
    remark: str
    about: str


def chips(choice: Choice) -> list[Chip]:
    """Return the questions of the first screen; but for image and question, a part's only where it was asked."""
    found = {family: deciding(choice.best.audit, family) for family in PARTS}
    if found["image"] is None and found["question"] is None:  # of a prompt without images, it is the question
        found["question"] = deciding(choice.best.audit, "prompt")
    asked = {family: finding for family, finding in found.items() if finding or family in ("image", "question")}
    parts = [_part(choice, family, finding) for family, finding in asked.items()]
    return [_accurate(choice), *parts, _shortcuts(choice)]


def use(choice: Choice) -> str:
    """Return the words before the name of the best checkpoint."""
    return "Use" if choice.accuracy.low > CHANCE else "Not shown to be better than chance:"


def peers(choice: Choice) -> str:
    """Return why it is this checkpoint, and which are as good; empty for one alone."""
    if choice.unlike or not choice.behind:
        return f"{choice.unlike}." if choice.unlike else ""
    ahead = [label for label, test in choice.behind.items() if test.difference.high < 0]
    equal = [label for label, test in choice.behind.items() if not test.difference.low > 0 and label not in ahead]
    pairs = next(iter(choice.behind.values())).pairs
    text = f"Of {len(choice.behind) + 1}, {choice.reason}. "
    text += f"As good, as far as {pairs:,} pairs can tell: {_few(equal)}." if equal else ""
    text += "" if equal or ahead else "Every other one is shown to be less accurate."
    return (text + (f" More accurate: {_few(ahead)}." if ahead else "")).strip()


def trust(choice: Choice, asked: Sequence[Chip]) -> dict[str, str]:
    """Return what to trust the checkpoint for, what not, and what the data cannot tell, by their first words."""
    listed = {lead: [chip.about for chip in asked if chip.good is good] for good, lead in LEADS.items()}
    if weak := _weak(choice):
        listed[LEADS[False]].append(f"the {'categories' if len(weak) > 1 else 'category'} {_few(weak)}")
    return {lead: "; ".join(abouts) for lead, abouts in listed.items() if abouts}


def summary(choice: Choice) -> str:
    """Return the first screen as lines of text."""
    asked = chips(choice)
    lines = [f"{use(choice)} {choice.path}", *filter(None, [peers(choice)])]
    lines += [
        f"  {it.question:27} {it.answer:11}  {it.number}{f' ({it.spread})' if it.spread else ''}" for it in asked
    ]
    return "\n".join([*lines, *(f"{lead}: {abouts}." for lead, abouts in trust(choice, asked).items())])


def changed(finding: Finding) -> str:
    """Return what was changed, as the first cell of its row."""
    return INTERVENTIONS[finding.name].view + f", {finding.category}" * bool(finding.category) + _of_several(finding)


def state(finding: Finding) -> str:
    """Return the finding in the words of its family: what is removed should be missed, and nothing else."""
    counts = {"reliant": True, "not reliant": False, "undecided": None}[finding.state]
    return _in_words(counts, removes=finding.family in REMOVING)


def state_of_output(name: str, lost: Estimate, moved: Estimate) -> str:
    """Return the finding about an output under an intervention, by its own intervals, in the same words.

    What is removed counts by what is lost, anything else by how far it moves the values; of an attack upwards.
    """
    intervention = INTERVENTIONS[name]
    of, margin = (lost, MARGIN) if intervention.removes else (moved, MOVED)
    beyond = of.low > margin or (of.high < -margin and not intervention.attack)
    within = of.high < margin and (of.low > -margin or intervention.attack)
    counts = True if beyond else False if within else None
    return _in_words(counts if of.clusters >= CLUSTERS else None, removes=intervention.removes)


def _in_words(counts: bool | None, *, removes: bool) -> str:
    if counts is None:
        return "cannot tell"
    if removes:
        return "relies on it" if counts else "does not rely on it"
    return "swayed by it" if counts else "not swayed"


def _accurate(choice: Choice) -> Chip:
    share, on_these = choice.accuracy, choice.best.accuracy
    good = True if share.low > CHANCE else False if share.high < CHANCE + MARGIN else None
    remark = f"Chance is {CHANCE:.0%}."
    if choice.among > 1:
        luck = points(round(on_these.value, 3) - round(share.value, 3))
        remark = (
            f"{percent(on_these.value)} on these pairs, less {luck} for the luck of the choice among {choice.among}."
        )
    spread = f"{interval(share)}, {on_these.n:,} pairs"
    return Chip("Accurate?", _word(good), good, percent(share.value), spread, remark, "ranking answers like these")


def _part(choice: Choice, family: str, finding: Finding | None) -> Chip:
    question, about = PARTS[family]
    if finding is None:
        reasons = (reason for name, reason in choice.limits.items() if INTERVENTIONS[name].family == family)
        reason = next(reasons, "evaluate with interventions")
        return Chip(question, _word(None), None, "–", "", f"Not measured: {reason}.", about)
    uses = {"reliant": True, "not reliant": False, "undecided": None}[finding.state]
    worse = uses is True and finding.loss.value < 0
    remark = _condition(finding) + _of_several(finding)
    if worse:
        remark += ": for the worse"
    elif uses and finding.left.low > CHANCE:
        remark += ", but more than chance is left"
    return Chip(
        question, _word(uses), uses and not worse, *_lost(choice, finding), f"{remark}.{_doubt(finding)}", about
    )


def _shortcuts(choice: Choice) -> Chip:
    """Return whether anything sways it that should not: the largest of what does, or could."""
    question, about = "Takes shortcuts?", "answers padded or dressed up"
    asked = [finding for finding in choice.best.audit if finding.family not in REMOVING]
    if not asked:
        return Chip(question, _word(None), None, "–", "", "Not measured: evaluate with interventions.", about)
    swayed, undecided = ([it for it in asked if it.state == state] for state in ("reliant", "undecided"))
    largest = max(swayed or undecided or asked, key=_harm)
    takes = True if swayed else None if undecided else False
    if swayed:
        about = ", ".join("answers in one order alone" if it.family == "order" else changed(it) for it in swayed)
    of = f" The largest of {len(asked)} changes." if len(asked) > 1 and not swayed else ""
    remark = f"{_condition(largest)}.{of}{_doubt(largest)}"
    return Chip(question, _word(takes), None if takes is None else not takes, *_lost(choice, largest), remark, about)


def _weak(choice: Choice) -> list[str]:
    """Return the categories shown to be below the whole by more than the margin, the weakest first."""
    shares = {name: it for name, it in choice.best.shares(CATEGORY).items() if it.clusters >= CLUSTERS}
    least = choice.best.accuracy.value - MARGIN
    p = holm([stdtr(it.clusters - 1, (it.value - least) / max(it.standard_error, 1e-9)) for it in shares.values()])
    weak = sorted((it.value, name) for (name, it), one in zip(shares.items(), p, strict=True) if one < LEVEL)
    return [f"{name} ({percent(value)}, {interval(shares[name])}, {shares[name].n:,} pairs)" for value, name in weak]


def _word(answer: bool | None) -> str:
    return "cannot tell" if answer is None else "yes" if answer else "no"


def _harm(finding: Finding) -> float:
    """Return how far a change sways a model; who punishes a decoration does no wrong."""
    return finding.loss.value if INTERVENTIONS[finding.name].attack else abs(finding.loss.value)


def _lost(choice: Choice, finding: Finding) -> tuple[str, str]:
    """Return the points of accuracy that are lost, and their interval with the pairs that were asked about."""
    loss, total = finding.loss, choice.best.accuracy.n
    forward = loss.value >= 0
    low, high = (loss.low, loss.high) if forward else (-loss.high, -loss.low)
    words = ("for standing first", "for standing last") if finding.family == "order" else ("lost", "gained")
    of = f" of {total:,}" if loss.n < total else ""
    return (
        f"{points(abs(loss.value))} points {words[not forward]}",
        f"{points(low)} to {points(high)}, {loss.n:,}{of} pairs",
    )


def _condition(finding: Finding) -> str:
    condition = INTERVENTIONS[finding.name].condition
    return condition[0].upper() + condition[1:]


def _doubt(finding: Finding) -> str:
    """Return what is in the way of an answer; empty for one that is given."""
    if finding.state != "undecided":
        return ""
    shown = "none" if isnan(finding.detectable) else f"one of {points(finding.detectable)}"
    counts = f"From {number(100 * finding.margin, 0)} points on a loss counts; these pairs would show {shown}."
    return f" {finding.reason or counts}"


def _of_several(finding: Finding) -> str:
    """Say of how many variants the figures are the mean: the accuracy under one of them is another."""
    return f" (mean of {finding.averaged} variants)" if finding.averaged > 1 else ""


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
