"""The sections of the report: what each shows, in words, figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vlmrm.errors import DataError
from vlmrm.evaluation.comparing import PairedTest, compare
from vlmrm.evaluation.public import benchmark, table
from vlmrm.evaluation.report import figures
from vlmrm.evaluation.report.checkpoints import Checkpoint
from vlmrm.evaluation.report.figures import Share
from vlmrm.evaluation.report.parts import Drawing, Section, Table, accuracy_share, interval, number, percent, points
from vlmrm.evaluation.report.reliance import ABLATIONS, LEAKED, of_leakage, of_reliance, of_shortcuts
from vlmrm.evaluation.report.sweeps import Choice

CATEGORIES = 40  # in one figure; the table of a sweep has them all
COMPARED = 8  # checkpoints of the matrix


def sections(checkpoints: Sequence[Checkpoint], choice: Choice) -> list[Section]:
    """All of them, in the order of the page; most are of the best checkpoint."""
    best = choice.best
    return [
        of_checkpoints(checkpoints, best),
        *([of_published(best, *choice.benchmark)] if choice.benchmark else []),
        of_reliance(best),
        of_categories(best),
        of_scores(best),
        of_calibration(best),
        of_shortcuts(best),
        of_leakage(best, choice.leakage),
        of_comparison(checkpoints),
        of_best_of_n(best),
    ]


def of_checkpoints(checkpoints: Sequence[Checkpoint], best: Checkpoint) -> Section:
    curves = []
    for model in dict.fromkeys(one.model for one in checkpoints):
        stepped = [one for one in checkpoints if one.model == model and not np.isnan(one.step)]
        if stepped:
            label = stepped[0].label.rpartition("/")[0] or "accuracy"
            curves.append(figures.Curve(label, [one.step for one in stepped], [one.accuracy for one in stepped]))
    drawings = []
    drawn = any(len(curve.steps) > 1 for curve in curves)
    if drawn:
        alt = "; ".join(
            f"{c.label}: from {percent(c.accuracies[0].value)} at step {c.steps[0]:,.0f} "
            f"to {percent(c.accuracies[-1].value)} at step {c.steps[-1]:,.0f}"
            for c in curves
        )
        ring = None if np.isnan(best.step) else (best.step, best.accuracy.value)
        figure = figures.accuracy_by_step(curves, ring)
        caption = "Accuracy of each checkpoint. Bands are 95% intervals; the ring marks the best."
        drawings.append(Drawing("accuracy_by_step", figure, f"Accuracy by training step. {alt}.", caption))
    head = ["checkpoint", "accuracy", "95% interval", "pairs", "mean margin", "loss"]
    ablated = [name for name in ABLATIONS if any(one.ablated(name).n for one in checkpoints)]
    rows = [
        [
            one.label + (" (best)" if one is best and len(checkpoints) > 1 else ""),
            percent(one.accuracy.value),
            interval(one.accuracy),
            f"{one.accuracy.n:,}",
            number(one.margins.mean()),
            number(one.figures["loss"]["value"]),
            *[percent(one.ablated(name).value) for name in ablated],
        ]
        for one in checkpoints
    ]
    table = Table("Every checkpoint", [*head, *[name.replace("_", " ") for name in ablated]], rows)
    text = "How much of the difference between checkpoints is noise: bands and intervals that overlap widely say so."
    if not drawn:
        text = "One checkpoint a model: there is no curve over steps to draw."
    return Section("checkpoints", "Checkpoints", text, drawings, [table])


def of_published(best: Checkpoint, name: str, ours: Mapping[str, float]) -> Section:
    """Our figures on a public benchmark, and those that others published."""
    public = benchmark(name)
    metrics = list(dict.fromkeys(figure.metric for figure in public.published))
    rows = [
        [line["model"], *["–" if line[one] is None else percent(line[one]) for one in metrics], line["source"]]
        for line in table(name, ours, best.label)
    ]
    head = ["model", *[metric.replace("_", " ") for metric in metrics], "source"]
    text = f"On {public.title}, by its authors' rule. {public.verified}"
    return Section("published", "Beside published models", text, tables=[Table(public.title, head, rows)])


def of_categories(best: Checkpoint) -> Section:
    found = best.groups
    drawings = []
    for name, groups in {"category": found["category"], **found["by"]}.items():
        if name == LEAKED:
            continue
        shares = {value: accuracy_share(group) for value, group in groups.items() if group["sample_count"]}
        if shares:
            drawings.append(_by_value(name, shares, best.accuracy.value))
    text = "Where intervals overlap, the order is no ranking."
    return Section("categories", "By category", text if drawings else "No row has a category.", drawings)


def _by_value(name: str, shares: dict[str, Share], overall: float) -> Drawing:
    largest = sorted(shares, key=lambda value: -shares[value].n)[:CATEGORIES]
    shown = {value: shares[value] for value in sorted(largest, key=lambda value: -shares[value].value)}
    weakest = list(shown)[-1]
    alt = f"Accuracy by {name}, {len(shown)} values; the weakest is {weakest} with {percent(shown[weakest].value)}."
    caption = f"Accuracy by {name}, with 95% intervals; dashed: all pairs, solid: chance."
    if len(shares) > len(shown):
        caption += f" The {CATEGORIES} largest of {len(shares)}."
    return Drawing(f"accuracy_by_{_slug(name)}", figures.intervals(shown, overall), alt, caption)


def of_scores(best: Checkpoint) -> Section:
    chosen, rejected = (best.pairs[f"{side}_score"].to_numpy(dtype=np.float64) for side in ("chosen", "rejected"))
    below = float(np.mean(best.margins <= 0))
    scores = Drawing(
        "scores",
        figures.score_histograms(chosen, rejected),
        f"Histograms of scores: chosen with mean {chosen.mean():.2f}, rejected with mean {rejected.mean():.2f}.",
        "Scores of the chosen and of the rejected answers. They overlap because prompts differ, too.",
    )
    margins = Drawing(
        "margins",
        figures.margin_distribution(best.margins, below),
        f"Histogram of margins with mean {best.margins.mean():.2f}; {below:.1%} are not above zero.",
        "Margins: how far the chosen answer is ahead in each pair. The outer bars hold all beyond them.",
    )
    text = f"Mean margin {number(best.margins.mean())}, standard deviation {best.margins.std():.3f}."
    return Section("scores", "Scores and margins", text, [scores, margins])


def of_calibration(best: Checkpoint) -> Section:
    found = best.figures
    bins = [row for row in found["reliability"] if row["count"]]
    error, temperature, brier = found["ece"], found["temperature"], found["brier"]["value"]
    drawing = Drawing(
        "reliability",
        figures.reliability(bins),
        f"Reliability diagram with {len(bins)} bins; expected calibration error {error:.3f}.",
        "Each pair counts in both directions, so that the diagram is symmetric.",
    )
    text = f"Expected calibration error {error:.3f}, Brier score {brier:.3f}. "
    if temperature == 0:
        text += "Every pair is right, so that these pairs cannot tell a temperature."
    elif np.isinf(temperature):
        text += "The mean margin is not above zero: no opinion would fit these pairs better than this one."
    else:
        verdict = "too sure of itself" if temperature > 1 else "less sure than it could be"
        text += f"Scores divided by {temperature:.2f} would fit these pairs best: the model is {verdict}."
    return Section("calibration", "Is σ(margin) a probability?", text, [drawing])


def of_comparison(checkpoints: Sequence[Checkpoint]) -> Section:
    title = "Are the differences real?"
    if len(checkpoints) < 2:
        return Section("comparison", title, "One checkpoint: there is nothing to compare.")
    by_accuracy = sorted(checkpoints, key=lambda one: -one.accuracy.value)[:COMPARED]
    try:
        tests = compare({one.label: one.rows for one in by_accuracy})
    except DataError as error:
        return Section("comparison", title, f"{error}.")
    labels = [one.label for one in by_accuracy]
    cells = {(test.first, test.second): _compared(test, 1) for test in tests}
    cells |= {(test.second, test.first): _compared(test, -1) for test in tests}
    rows = [
        [f"{i}  {row}", *[cells.get((row, column), "·") for column in labels]] for i, row in enumerate(labels, start=1)
    ]
    numbers = [str(i) for i in range(1, len(labels) + 1)]
    caption = (
        "Points of accuracy that the row is ahead of the column, their 95% interval, and p, on "
        f"{tests[0].pairs:,} common pairs"
    )
    text = (
        "A small p (McNemar's, exact, adjusted for the number of comparisons) says that a difference is hardly "
        "chance. It takes pairs as independent; the intervals draw whole prompts."
    )
    if len(checkpoints) > COMPARED:
        text += f" The {COMPARED} best of {len(checkpoints)}."
    return Section("comparison", title, text, tables=[Table(caption, ["checkpoint", *numbers], rows)])


def of_best_of_n(best: Checkpoint) -> Section:
    title = "Best of N"
    curve = best.figures["best_of_n"]
    if not curve:
        return Section("best_of_n", title, "The data have no ranked lists of three or more answers.")
    one, most = curve[0], curve[-1]
    alt = f"The pick's rating goes from {one['model']:.2f} for one candidate to {most['model']:.2f} for {most['n']}."
    caption = (
        f"Expected rating of the pick from N candidates, over {one['lists']:,} lists; {most['lists']:,} of them have "
        f"{most['n']} candidates."
    )
    drawing = Drawing("best_of_n", figures.best_of_n(curve), alt, caption)
    return Section("best_of_n", title, "What choosing with this model is worth.", [drawing])


def _compared(test: PairedTest, sign: int) -> str:
    p = test.adjusted_p_value
    ahead, low, high = (sign * end for end in test.difference[:3])
    lines = [points(ahead), "p < 0.001" if p < 0.001 else f"p = {p:.3f}"]
    if not np.isnan(low):
        lines.insert(1, f"{points(min(low, high))} to {points(max(low, high))}")
    return "\n".join(lines)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
