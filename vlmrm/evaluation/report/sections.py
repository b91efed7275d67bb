"""The sections of the report: their texts, figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vlmrm.errors import DataError
from vlmrm.evaluation.public import benchmark, published_table
from vlmrm.evaluation.report import audit
from vlmrm.evaluation.report.checkpoints import Checkpoint, Choice, TrainingLog, interval, number, percent, points
from vlmrm.measures import plots
from vlmrm.measures.analysis import GROUP
from vlmrm.measures.analysis import LEVEL as TOGETHER
from vlmrm.measures.differences import PairedTest, compare
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS, Metric

CATEGORIES = 40  # in one figure; the table beside it has them all
CATEGORY = "category"
LONG = 30  # letters of a name, more than half a page has room for
COMPARED = 8  # checkpoints of the matrix
LEAKS = 2  # rows that are named of each kind; the results have more
LEAKED = "leaked"  # the column that a sweep with train_data adds, shown in a section of its own


@dataclass(frozen=True)
class Drawing:
    """A figure with its file name, its description for readers who cannot see it, and its caption."""

    name: str
    figure: Figure
    alt: str
    caption: str


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first of each names it. With many columns or long names it stands across the page."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    @property
    def across(self) -> bool:
        return len(self.head) > 6 or any(len(row[0]) > LONG for row in self.rows)


@dataclass(frozen=True)
class Section:
    """One heading of the page. Without drawings and tables, `text` says why there is nothing to show."""

    id: str
    title: str
    text: str
    drawings: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def sections(
    checkpoints: Sequence[Checkpoint], choice: Choice, logs: Mapping[str, TrainingLog] | None = None
) -> list[Section]:
    """Return all sections in the order of the page; most are of the best checkpoint. `logs` are by training."""
    best = choice.best
    return [
        of_checkpoints(checkpoints, best),
        *([of_training(logs)] if logs else []),
        *([of_published(best, *choice.benchmark)] if choice.benchmark else []),
        of_audit(best, choice.limits),
        of_categories(best),
        of_scores(best),
        of_calibration(best),
        of_best_of_n(best),
        of_shortcuts(best),
        of_leakage(best, choice.leakage),
        of_comparison(checkpoints),
    ]


def halves(page: Sequence[Section]) -> set[str]:
    """Return the ids of sections that stand side by side: two in a row with at most one drawing and no table."""
    ids: list[str] = []
    for first, second in pairwise(page):
        if first.id not in ids and all(len(s.drawings) < 2 and not s.tables for s in (first, second)):
            ids += [first.id, second.id]
    return set(ids)


def of_checkpoints(checkpoints: Sequence[Checkpoint], best: Checkpoint) -> Section:
    curves = []
    for model in dict.fromkeys(checkpoint.model for checkpoint in checkpoints):
        stepped = [(c.step, c.accuracy, c.label) for c in checkpoints if c.model == model and not np.isnan(c.step)]
        if stepped:
            steps, accuracies, labels = zip(*stepped, strict=True)
            curves.append(plots.Curve(labels[0].rpartition("/")[0] or "accuracy", steps, accuracies))
    drawings = []
    drawn = any(len(curve.steps) > 1 for curve in curves)
    if drawn:
        alt = "; ".join(
            f"{c.label}: from {percent(c.accuracies[0].value)} at step {c.steps[0]:,.0f} "
            f"to {percent(c.accuracies[-1].value)} at step {c.steps[-1]:,.0f}"
            for c in curves
        )
        ring = None if np.isnan(best.step) else (best.step, best.accuracy.value)
        figure = plots.accuracy_by_step(curves, ring)
        caption = "Accuracy of each checkpoint. Bands are 95% intervals; the ring marks the best."
        drawings.append(Drawing("accuracy_by_step", figure, f"Accuracy by training step. {alt}.", caption))
    altered = {f"{name}_accuracy" for name in INTERVENTIONS}
    columns = [metric for metric in _tabled(checkpoints) if metric.name not in altered]
    rows = [
        [
            checkpoint.label + (" (best)" if checkpoint is best and len(checkpoints) > 1 else ""),
            percent(checkpoint.accuracy.value),
            interval(checkpoint.accuracy),
            f"{checkpoint.accuracy.n:,}",
            *[(percent if metric.percent else number)(metric.value(checkpoint.figures)) for metric in columns],
        ]
        for checkpoint in checkpoints
    ]
    head = ["checkpoint", "accuracy", "95% interval", "pairs", *[metric.label for metric in columns]]
    tables = [Table("Every checkpoint", head, rows), *_altered_accuracies(checkpoints)]
    text = "" if drawn else "One checkpoint a model: there is no curve over steps to draw."
    if len(checkpoints) > 1:
        text = f"{text} Bands and intervals are each checkpoint's own; whether two differ is tested below.".strip()
    return Section("checkpoints", "Checkpoints", text, drawings, tables)


def _tabled(checkpoints: Sequence[Checkpoint]) -> list[Metric]:
    """Return the metrics of the table of checkpoints that one of them has."""
    shown = (metric for metric in METRICS.values() if metric.column and metric.label)
    return [metric for metric in shown if not all(np.isnan(metric.value(c.figures)) for c in checkpoints)]


def _altered_accuracies(checkpoints: Sequence[Checkpoint]) -> list[Table]:
    """Return the table of accuracies under each intervention, a column a checkpoint; none without interventions."""
    compared = sorted(checkpoints, key=lambda checkpoint: -checkpoint.accuracy.value)[:COMPARED]
    metrics = {metric.name for metric in _tabled(compared)}
    rows = [
        [intervention.view, *[percent(checkpoint.altered(name).value) for checkpoint in compared]]
        for name, intervention in INTERVENTIONS.items()
        if f"{name}_accuracy" in metrics
    ]
    if len(compared) < 2 or not rows:
        return []
    few = f" of the {COMPARED} best checkpoints" if len(checkpoints) > COMPARED else ""
    caption = f"Accuracy{few} by what the model saw"
    return [Table(caption, ["what the model saw", *[checkpoint.label for checkpoint in compared]], rows)]


def of_training(logs: Mapping[str, TrainingLog]) -> Section:
    drawings = []
    for index, (name, log) in enumerate(logs.items()):
        last = next(entry for entry in reversed(log) if "loss" in entry)
        end = f"a loss of {last['loss']:.3f} at step {last['step']:,}"
        alt = f"Loss and accuracy of {name} by training step, to {end}."
        drawings.append(Drawing(f"learning_{index}", plots.learning_curves(log), alt, f"{name}: loss and accuracy."))
    text = "What the trainings logged. Where the lines of a figure part, the model learns its training data by heart."
    return Section("training", "Training", text, drawings)


def of_published(best: Checkpoint, name: str, measured: Mapping[str, Mapping[str, Any]]) -> Section:
    """Show the checkpoint's figures on a public benchmark beside the published ones."""
    public = benchmark(name)
    metrics = list(dict.fromkeys(figure.metric for figure in public.published_figures))
    rows = [
        [str(line["model"]), *[_published(line[metric]) for metric in metrics], str(line["source"])]
        for line in published_table(name, {name: Estimate(**parts) for name, parts in measured.items()}, best.label)
    ]
    head = ["model", *[metric.replace("_", " ") for metric in metrics], "source"]
    text = f"On {public.title}, by its authors' rule, in percent with 95% intervals. {public.verified}"
    return Section("published", "Beside published models", text, tables=[Table(public.title, head, rows)])


def _published(figure: Estimate | str | float | None) -> str:
    """Write a figure in percent, an estimate with its interval."""
    if isinstance(figure, Estimate):
        return figure.in_percent()
    return f"{100 * figure:.1f}" if isinstance(figure, float) else "–"


def of_audit(best: Checkpoint, limits: Mapping[str, str]) -> Section:
    """Show what the preference rests on: accuracy under each intervention, and a finding for each question."""
    title = "What does its preference rest on?"
    scored = {name: best.altered(name) for name in INTERVENTIONS if best.altered(name).n}
    drawings = []
    if scored:
        plain = best.accuracy
        named = {"as it is": plain, **{INTERVENTIONS[name].view: share for name, share in scored.items()}}
        alt = "Accuracy " + ", ".join(f"{name} {percent(share.value)}" for name, share in named.items()) + "."
        ends = "with 95% intervals; dashed: as it is, solid: chance."
        caption = f"Accuracy with one thing changed, {ends}"
        drawings = [Drawing("reliance", plots.intervals(named, plain.value), alt, caption)]
    head = ["what was changed", "finding", "points lost", "95% interval", "counts from", "would have seen"]
    rows = [
        [
            audit.changed(finding),
            audit.state(finding),
            points(finding.loss.value),
            "–" if np.isnan(finding.loss.low) else f"{points(finding.loss.low)} to {points(finding.loss.high)}",
            points(finding.margin),
            points(finding.detectable),
            f"{finding.loss.n:,}",
            f"{finding.loss.clusters:,}",
        ]
        for finding in best.audit
    ]
    table = Table("Points of accuracy lost; below zero, gained", [*head, "pairs", "clusters"], rows)
    text = "Not measured: evaluate with interventions. " if not scored else ""
    text += (
        "A change counts where it is shown to be above the margin, as none where it is shown to be below, and is "
        f"undecided otherwise; {TOGETHER:.0%} is the risk that any of the findings is wrong, all questions together. "
        "Without its part, a model that uses it falls to the accuracy that the rest allows, 50% where that tells "
        "nothing; below 50%, what takes its place favours the rejected answer."
    )
    reasons = [f"{audit.changed(finding)}: {finding.reason}" for finding in best.audit if finding.reason]
    elsewhere, lost = (best.figures[name]["value"] for name in ("swapped_prompt_margin", "prompt_reliance"))
    if not np.isnan(elsewhere):
        text += (
            f" Under another row's prompt, where neither answer should win, the mean margin is {number(elsewhere)} "
            f"instead of {number(elsewhere + lost)}."
        )
    if reasons:
        text += f" Undecided: {' '.join(reasons)}"
    for reason in dict.fromkeys(limits.values()):
        views = (INTERVENTIONS[name].view for name, its_reason in limits.items() if its_reason == reason)
        text += f" Not tried: {', '.join(views)} ({reason})."
    return Section("reliance", title, text, drawings, [table])


def of_categories(best: Checkpoint) -> Section:
    drawings, tables = [], []
    for column in (CATEGORY, *(GROUP + name for name in best.groups["by"] if name != LEAKED)):
        name, shares = column.removeprefix(GROUP), best.shares(column)
        if shares:
            best_first = dict(sorted(shares.items(), key=lambda item: -item[1].value))
            drawings.append(_by_value(name, best_first, best.accuracy.value))
            rows = [[v, f"{it.n:,}", percent(it.value), interval(it)] for v, it in best_first.items()]
            tables.append(Table(f"Accuracy by {name}", [name, "pairs", "accuracy", "95% interval"], rows))
    text = "Intervals take pairs of one image, or of one prompt without images, together."
    return Section("categories", "By category", text if drawings else "No row has a category.", drawings, tables)


def _by_value(name: str, best_first: dict[str, Estimate], overall: float) -> Drawing:
    largest = sorted(best_first, key=lambda value: -best_first[value].n)[:CATEGORIES]
    drawn = {value: share for value, share in best_first.items() if value in set(largest)}
    weakest, share = list(drawn.items())[-1]
    alt = f"Accuracy by {name}, {len(drawn)} values; the weakest is {weakest} with {percent(share.value)}."
    caption = f"Accuracy by {name}, with 95% intervals; dashed: all pairs, solid: chance."
    if len(best_first) > len(drawn):
        caption += f" The {CATEGORIES} largest of {len(best_first)}."
    slug = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
    return Drawing(f"accuracy_by_{slug}", plots.intervals(drawn, overall), alt, caption)


def of_scores(best: Checkpoint) -> Section:
    chosen, rejected = (best.pairs[f"{side}_score"].to_numpy(dtype=np.float64) for side in ("chosen", "rejected"))
    below = float(np.mean(best.margins <= 0))
    scores = Drawing(
        "scores",
        plots.score_histograms(chosen, rejected),
        f"Histograms of scores: chosen with mean {chosen.mean():.2f}, rejected with mean {rejected.mean():.2f}.",
        "Scores of the chosen and of the rejected answers. They overlap because prompts differ, too.",
    )
    margins = Drawing(
        "margins",
        plots.margin_distribution(best.margins, below),
        f"Histogram of margins with mean {best.margins.mean():.2f}; {below:.1%} are not above zero.",
        "Margins: how far the chosen answer is ahead in each pair. The outer bars hold all beyond them.",
    )
    text = f"Mean margin {number(best.margins.mean())}, standard deviation {best.margins.std():.3f}."
    return Section("scores", "Scores and margins", text, [scores, margins])


def of_calibration(best: Checkpoint) -> Section:
    figures = best.figures
    bins = [row for row in figures["reliability"] if row["count"]]
    error, temperature, brier = (figures[name]["value"] for name in ("ece", "temperature", "brier"))
    drawing = Drawing(
        "reliability",
        plots.reliability(bins),
        f"Reliability diagram with {len(bins)} bins; expected calibration error {error:.3f}.",
        "Each pair counts in both directions, so that the diagram is symmetric.",
    )
    text = f"Expected calibration error {error:.3f}, Brier score {brier:.3f}. "
    if temperature == 0:
        why = "Every pair is right" if best.margins.min() > 0 else "No margin is below zero"
        text += f"{why}, so no temperature can be fitted."
    elif np.isinf(temperature):
        text += "The mean margin is not above zero: probabilities of 50% would fit these pairs better."
    else:
        low, high = (figures["temperature"][end] for end in ("low", "high"))
        fault = "the model is " + ("overconfident" if temperature > 1 else "underconfident")
        if not (low > 1 or high < 1):
            fault = f"with an interval of {number(low, 2)} to {number(high, 2)}, 1 may be as good"
        text += f"Scores divided by {temperature:.2f} would fit these pairs best: {fault}."
    return Section("calibration", "Is σ(margin) a probability?", text, [drawing])


def of_shortcuts(best: Checkpoint) -> Section:
    title = "Does it take shortcuts?"
    (of_length, length), (of_area, area) = _length(best), _area(best)
    texts, drawings = [*of_length, *of_area], [*length, *area]
    of_prompts = (metric for metric in METRICS.values() if metric.label and metric.needs in ("pixels", "images"))
    texts += [_correlated(best, metric) for metric in of_prompts if not np.isnan(metric.value(best.figures))]
    nothing = "Nothing to show: no two answers are known to differ in length or image size, nor prompts in images."
    return Section("shortcuts", title, " ".join(texts) or nothing, drawings)


def _length(best: Checkpoint) -> tuple[list[str], list[Drawing]]:
    """Show whether it prefers longer answers: texts and drawings, none where all are equally long."""
    differences = _differences(best, "length")
    if not differences.any():
        return [], []
    correlation = number(best.figures["margin_length_correlation"]["value"], 2)
    baseline = percent(best.figures["length_baseline_accuracy"]["value"])
    correlated = _correlated(best, METRICS["margin_length_correlation"])
    text = f"Always taking the longer answer would be right in {baseline}. {correlated}"
    scatter = Drawing(
        "length",
        plots.bias(differences, best.margins, "chosen longer than rejected by (characters)"),
        f"Margin against length difference, rank correlation {correlation}.",
        f"Margins of {min(plots.POINTS, len(differences)):,} of {len(differences):,} pairs, and means over all.",
    )
    sides = {
        "chosen longer": best.share("accuracy_chosen_longer"),
        "chosen shorter": best.share("accuracy_chosen_shorter"),
    }
    sides = {name: share for name, share in sides.items() if share.n}
    alt = "Accuracy where " + ", ".join(f"{name}: {percent(share.value)}" for name, share in sides.items()) + "."
    caption = "A model that prefers length is right where the chosen answer is longer, and wrong where it is shorter."
    split = Drawing("length_accuracy", plots.intervals(sides, best.accuracy.value), alt, caption)
    return [text], [scatter, split]


def _area(best: Checkpoint) -> tuple[list[str], list[Drawing]]:
    """Show whether it prefers larger images, where answers are images of different sizes."""
    differences = _differences(best, "pixels") / 1e6
    if np.isnan(best.figures["score_area_correlation"]["value"]) or not differences.any():
        return [], []
    sentence = _correlated(best, METRICS["score_area_correlation"])
    drawing = Drawing(
        "image_size",
        plots.bias(differences, best.margins, "chosen images larger by (megapixels)"),
        f"Margin against difference in image area. {sentence}",
        f"Margins of {min(plots.POINTS, len(differences)):,} of {len(differences):,} pairs, and means over all.",
    )
    return [sentence], [drawing]


def _correlated(best: Checkpoint, metric: Metric) -> str:
    return f"{metric.label} have a rank correlation of {number(metric.value(best.figures), 2)}."


def _differences(best: Checkpoint, name: str) -> np.ndarray:
    """Return the chosen minus the rejected answer's `name`, such as length: [N], zeros if it is unknown."""
    sides = [f"{side}_{name}" for side in ("chosen", "rejected")]
    if not set(sides) <= set(best.pairs):
        return np.zeros(len(best.pairs))
    chosen, rejected = (best.pairs[side].to_numpy(dtype=np.float64) for side in sides)
    return chosen - rejected


def of_leakage(best: Checkpoint, leakage: dict[str, Any] | None) -> Section:
    title = "Was it trained on this?"
    if leakage is None:
        return Section("leakage", title, "Not measured: evaluate with train_data, what the model was trained on.")
    examples = [
        f"{row} ({kind} of {train})"
        for kind in ("prompt", "image")
        for train, row in leakage["near"][kind]["pairs"][:LEAKS]
    ]
    such_as = f", such as {', '.join(examples)}" if examples else ""
    leaked = f"{leakage['leaked_rows']:,} of {leakage['rows']:,}"
    text = f"{leaked} rows have a prompt or an image that was trained on{such_as}."
    if leakage["unreadable_rows"]:
        text += f" {leakage['unreadable_rows']:,} rows could not be read."
    rows = []
    for kind, piece in (("prompt", "a prompt"), ("answer", "an answer"), ("image", "an image")):
        exact, near = leakage["exact"][kind], leakage["near"][kind]
        rows.append([piece, *(f"{count:,}" for count in (exact["rows"], near["rows"], near["total"]))])
    table = Table("Rows with something that was trained on", ["what", "exactly", "nearly", "of"], rows)
    shares, kinds = best.shares(GROUP + LEAKED), {"trained on": "yes", "new": "no"}
    apart = {name: shares[value] for name, value in kinds.items() if value in shares}
    if len(apart) < 2:
        return Section("leakage", title, text, tables=[table])
    alt = "Accuracy on rows " + ", ".join(f"{name}: {percent(share.value)}" for name, share in apart.items()) + "."
    caption = "Accuracy on rows trained on and on new ones, with 95% intervals; dashed: all pairs, solid: chance."
    drawing = Drawing("leakage", plots.intervals(apart, best.accuracy.value), alt, caption)
    return Section("leakage", title, text, [drawing], [table])


def of_comparison(checkpoints: Sequence[Checkpoint]) -> Section:
    title = "Are the differences real?"
    if len(checkpoints) < 2:
        return Section("comparison", title, "One checkpoint: there is nothing to compare.")
    by_accuracy = sorted(checkpoints, key=lambda checkpoint: -checkpoint.accuracy.value)[:COMPARED]
    try:
        tests = compare({checkpoint.label: checkpoint.rows for checkpoint in by_accuracy})
    except DataError as error:
        return Section("comparison", title, f"{error}.")
    labels = [checkpoint.label for checkpoint in by_accuracy]
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
    sizes = sorted(test.detectable for test in tests if not np.isnan(test.detectable))
    between = " to ".join(points(size) for size in (*sizes[:1], *sizes[1:][-1:]))
    seen = f"These clusters show a difference of {between} points four times in five; a smaller one may stay unseen."
    seen = seen if sizes else "So few clusters show no difference."
    text = (
        "A difference is more than chance where its interval is without zero, and there p is below 0.05. Both are "
        f"from exchanges within whole clusters and hold for all {len(tests)} comparisons together. "
        f"{seen}"
    )
    if len(checkpoints) > COMPARED:
        text += f" The {COMPARED} best of {len(checkpoints)}."
    return Section("comparison", title, text, tables=[Table(caption, ["checkpoint", *numbers], rows)])


def of_best_of_n(best: Checkpoint) -> Section:
    title = "Best of N"
    curve = best.figures["best_of_n"]
    if not curve:
        return Section("best_of_n", title, "The data have no ranked lists of three or more answers.")
    least, most = curve[0], curve[-1]
    ends = f"{least['model']['value']:.2f} for one candidate to {most['model']['value']:.2f} for {most['n']}"
    alt = f"The pick's rating goes from {ends}."
    caption = (
        f"Expected rating of the pick from N candidates, over {least['lists']:,} lists; {most['lists']:,} of them "
        f"have {most['n']} candidates."
    )
    drawing = Drawing("best_of_n", plots.best_of_n(curve), alt, caption)
    return Section("best_of_n", title, "What choosing with this model is worth.", [drawing])


def _compared(test: PairedTest, sign: int) -> str:
    p = test.p_value
    ahead, low, high = (sign * end for end in test.difference[:3])
    lines = [points(ahead), "p < 0.001" if p < 0.001 else f"p = {p:.3f}"]
    if not np.isnan(low):
        lines.insert(1, f"{points(min(low, high))} to {points(max(low, high))}")
    return "\n".join(lines)
