"""The sections on what a preference rests on: the image, the question, a shortcut, or what was trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from vlmrm.evaluation.report import figures
from vlmrm.evaluation.report.checkpoints import Checkpoint
from vlmrm.evaluation.report.parts import Drawing, Section, Table, accuracy_share, number, percent, points
from vlmrm.evaluation.report.verdict import verdict

LEAKS = 2  # named of each kind; the results have more
LEAKED = "leaked"  # the column of a sweep with train_data, which has a section of its own

# What each ablation shows the model, and which figure says how much accuracy it takes away.
ABLATIONS = {
    "blank_image": ("images painted grey", "image_reliance"),
    "swapped_image": ("another row's image", "swapped_image_reliance"),
    "swapped_prompt": ("another question and image", "swapped_prompt_reliance"),
    "response_only": ("no prompt at all", "response_only_reliance"),
}

PROMPT_IMAGES = {
    "margin_area_correlation": "Margin and area",
    "margin_images_correlation": "Margin and number",
    "score_images_correlation": "Score and number",
}


def headline(best: Checkpoint) -> str:
    """Say plainly whether the model looks at the image, with the figures that it rests on."""
    return verdict(best.figures).sentence


def of_reliance(best: Checkpoint) -> Section:
    title = "Does it look at the image, and need the prompt?"
    found = {name: best.ablated(name) for name in ABLATIONS if best.ablated(name).n}
    if not found:
        return Section("reliance", title, "Not measured: evaluate with ablations (blank_image, swapped_prompt, ...).")
    plain = best.share("accuracy_half_ties", len(best.pairs))
    named = {"as it is": plain, **{ABLATIONS[name][0]: one for name, one in found.items()}}
    alt = "Accuracy " + ", ".join(f"{name} {percent(one.value)}" for name, one in named.items()) + "."
    caption = (
        "Accuracy with something taken away or exchanged, equal scores at half, with 95% intervals; dashed: as it is, "
        "solid: chance."
    )
    drawing = Drawing("reliance", figures.intervals(named, plain.value), alt, caption)
    rows = [[what, *_lost(best, figure)] for what, figure in (ABLATIONS[name] for name in found)]
    table = Table("Points of accuracy lost; below zero, gained", ["what the model saw", "lost", "95% interval"], rows)
    text = (
        "A model that judges what it sees falls towards what the rest gives away, 50% where that is nothing, when it "
        "sees nothing or something else; below 50%, what it sees instead speaks for the rejected answer."
    )
    if "swapped_prompt" in found and best.figures["score_images_correlation"]["n"]:
        text += " Another row's question comes with its image, so that this tests the two together."
    elsewhere, lost = (best.figures[name]["value"] for name in ("swapped_prompt_margin", "prompt_reliance"))
    if not np.isnan(elsewhere):
        text += (
            f" Under another row's prompt, where neither answer should win, the mean margin is {number(elsewhere)} "
            f"instead of {number(elsewhere + lost)}."
        )
    return Section("reliance", title, text, [drawing], [table])


def of_shortcuts(best: Checkpoint) -> Section:
    title = "Does it take shortcuts?"
    texts, drawings = [], []
    for said, drawn in (_length(best), _area(best)):
        texts += said
        drawings += drawn
    for figure, what in PROMPT_IMAGES.items():
        correlation = best.figures[figure]["value"]
        if not np.isnan(correlation):
            texts.append(f"{what} of images in the prompt have a rank correlation of {number(correlation, 2)}.")
    nothing = "Nothing to show: no two answers are known to differ in length or image size, nor prompts in images."
    return Section("shortcuts", title, " ".join(texts) or nothing, drawings)


def _length(best: Checkpoint) -> tuple[list[str], list[Drawing]]:
    """Whether it prefers longer answers: what to say and to show, nothing where all are equally long."""
    differences = _differences(best, "length")
    if not differences.any():
        return [], []
    correlation = number(best.figures["margin_length_correlation"]["value"], 2)
    baseline = percent(best.figures["length_baseline_accuracy"]["value"])
    text = (
        f"Always taking the longer answer would be right in {baseline}. Margin and length difference have a rank "
        f"correlation of {correlation}."
    )
    scatter = Drawing(
        "length",
        figures.bias(differences, best.margins, "chosen longer than rejected by (characters)"),
        f"Margin against length difference, rank correlation {correlation}.",
        f"Margins of {min(figures.POINTS, len(differences)):,} of {len(differences):,} pairs, and means over all.",
    )
    sides = {
        "chosen longer": best.share("accuracy_chosen_longer", int((differences > 0).sum())),
        "chosen shorter": best.share("accuracy_chosen_shorter", int((differences < 0).sum())),
    }
    sides = {name: one for name, one in sides.items() if one.n}
    alt = "Accuracy where " + ", ".join(f"{name}: {percent(one.value)}" for name, one in sides.items()) + "."
    caption = "A model that prefers length is right where the chosen answer is longer, and wrong where it is shorter."
    split = Drawing("length_accuracy", figures.intervals(sides, best.accuracy.value), alt, caption)
    return [text], [scatter, split]


def _area(best: Checkpoint) -> tuple[list[str], list[Drawing]]:
    """Whether it prefers larger images, where answers are images of different sizes."""
    correlation = best.figures["score_area_correlation"]["value"]
    differences = _differences(best, "pixels") / 1e6
    if np.isnan(correlation) or not differences.any():
        return [], []
    said = f"Score and area of an answer's images have a rank correlation of {number(correlation, 2)}."
    drawing = Drawing(
        "image_size",
        figures.bias(differences, best.margins, "chosen images larger by (megapixels)"),
        f"Margin against difference in image area. {said}",
        f"Margins of {min(figures.POINTS, len(differences)):,} of {len(differences):,} pairs, and means over all.",
    )
    return [said], [drawing]


def _differences(best: Checkpoint, what: str) -> np.ndarray:
    """How much the chosen answers have more of it than the rejected: [N], zeros where that is not known."""
    sides = [f"{side}_{what}" for side in ("chosen", "rejected")]
    if not set(sides) <= set(best.pairs):
        return np.zeros(len(best.pairs))
    chosen, rejected = (best.pairs[side].to_numpy(dtype=np.float64) for side in sides)
    return chosen - rejected


def of_leakage(best: Checkpoint, found: dict[str, Any] | None) -> Section:
    title = "Was it trained on this?"
    if found is None:
        return Section("leakage", title, "Not measured: evaluate with train_data, what the model was trained on.")
    examples = [f"{row} ({kind} of {train})" for kind in ("prompt", "image") for train, row in _pairs(found, kind)]
    such_as = f", such as {', '.join(examples)}" if examples else ""
    text = (
        f"{found['leaked_rows']:,} of {found['rows']:,} rows have a prompt or an image that was trained on{such_as}."
    )
    if found["unreadable_rows"]:
        text += f" {found['unreadable_rows']:,} rows could not be looked at."
    rows = [
        [what, *(f"{found[how][kind]['rows']:,}" for how in ("exact", "near")), f"{found['near'][kind]['total']:,}"]
        for kind, what in (("prompt", "a prompt"), ("answer", "an answer"), ("image", "an image"))
    ]
    table = Table("Rows with something that was trained on", ["what", "exactly", "nearly", "of"], rows)
    groups = best.groups["by"].get(LEAKED, {})
    kinds = {"trained on": "yes", "new": "no"}
    apart = {name: accuracy_share(groups[value]) for name, value in kinds.items() if value in groups}
    if len(apart) < 2 or not all(one.n for one in apart.values()):
        return Section("leakage", title, text, tables=[table])
    alt = "Accuracy on rows " + ", ".join(f"{name}: {percent(one.value)}" for name, one in apart.items()) + "."
    caption = "Accuracy on rows trained on and on new ones, with 95% intervals; dashed: all pairs, solid: chance."
    drawing = Drawing("leakage", figures.intervals(apart, best.accuracy.value), alt, caption)
    return Section("leakage", title, text, [drawing], [table])


def _pairs(found: dict[str, Any], kind: str) -> list[tuple[str, str]]:
    """The first training and evaluation rows that nearly share it."""
    return found["near"][kind]["pairs"][:LEAKS]


def _lost(best: Checkpoint, figure: str) -> list[str]:
    lost = best.figures[figure]
    known = not np.isnan(lost["low"])
    return [points(lost["value"]), f"{points(lost['low'])} to {points(lost['high'])}" if known else "–"]
