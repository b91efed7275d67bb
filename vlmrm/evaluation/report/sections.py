"""The sections of the report: their texts, figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vlmrm.evaluation.public import benchmark, published_table
from vlmrm.evaluation.report import audit
from vlmrm.evaluation.report.checkpoints import (
    CATEGORY,
    Checkpoint,
    Choice,
    interval,
    number,
    percent,
    points,
)
from vlmrm.measures import plots
from vlmrm.measures.analysis import GROUP, MARGIN
from vlmrm.measures.analysis import LEVEL as TOGETHER
from vlmrm.measures.differences import PairedTest
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS
from vlmrm.outputs import COUNTS, FIGURES, Outputs

CATEGORIES = 40  # in one figure; the table beside it has them all
LONG = 30  # letters of a name, more than half a page has room for
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
    """Rows of texts; the first of each names it. With many columns or long names it stands across the page.

    The first `kept` rows stay in sight when the others scroll.
    """

    caption: str
    head: list[str]
    rows: list[list[str]]
    kept: int = 0

    @property
    def across(self) -> bool:
        return len(self.head) > 6 or any(len(row[0]) > LONG for row in self.rows)


@dataclass(frozen=True)
class Section:
    """One heading of the page. Without drawings and tables, `text` says why there is nothing to show.

    `method` comes after what was found.
    """

    id: str
    title: str
    text: str
    drawings: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    method: str = ""


def sections(checkpoints: Sequence[Checkpoint], choice: Choice) -> list[Section]:
    """Return all sections in the order of the page; most are of the best checkpoint."""
    best = choice.best
    of_rows = [of_outputs(choice.outputs, choice.rows)] if any("outputs" in row for row in choice.rows) else []
    if not checkpoints:
        return of_rows
    return [
        of_checkpoints(checkpoints, choice),
        *([of_published(best, *choice.benchmark)] if choice.benchmark else []),
        *of_rows,
        of_audit(best, choice.limits),
        of_categories(best),
        of_scores(best),
        of_calibration(best),
        of_best_of_n(best),
        of_shortcuts(best),
        of_leakage(best, choice.leakage),
    ]


def curve(checkpoints: Sequence[Checkpoint], best: Checkpoint) -> list[Drawing]:
    """Return the drawing of accuracy by step; none where no model has two checkpoints."""
    curves = []
    for model in dict.fromkeys(checkpoint.model for checkpoint in checkpoints):
        stepped = [(c.step, c.accuracy, c.label) for c in checkpoints if c.model == model and not np.isnan(c.step)]
        if stepped:
            steps, accuracies, labels = zip(*stepped, strict=True)
            curves.append(plots.Curve(labels[0].rpartition("/")[0] or "accuracy", steps, accuracies))
    if all(len(curve.steps) < 2 for curve in curves):
        return []
    alt = "; ".join(
        f"{c.label}: from {percent(c.accuracies[0].value)} at step {c.steps[0]:,.0f} "
        f"to {percent(c.accuracies[-1].value)} at step {c.steps[-1]:,.0f}"
        for c in curves
    )
    ring = None if np.isnan(best.step) else (best.step, best.accuracy.value)
    caption = "Accuracy of each checkpoint. Bands are 95% intervals; the ring marks the best."
    figure = plots.accuracy_by_step(curves, ring)
    return [Drawing("accuracy_by_step", figure, f"Accuracy by training step. {alt}.", caption)]


def of_checkpoints(checkpoints: Sequence[Checkpoint], choice: Choice) -> Section:
    """Show every checkpoint, the best first, and how far each is behind it."""
    others = {f"{name}_accuracy" for name, it in INTERVENTIONS.items() if not (it.decides and it.family == "image")}
    shown = (it for it in METRICS.values() if it.column and it.label and it.name not in others)
    columns = [metric for metric in shown if not all(np.isnan(metric.value(c.figures)) for c in checkpoints)]
    compared = ["points behind", "95% interval", "p"] if choice.behind else []
    rows = [
        [
            checkpoint.label + (" (best)" if checkpoint is choice.best and len(checkpoints) > 1 else ""),
            percent(checkpoint.accuracy.value),
            interval(checkpoint.accuracy),
            *([*_compared(choice.behind.get(checkpoint.label))] if compared else []),
            f"{checkpoint.accuracy.n:,}",
            *[(percent if metric.percent else number)(metric.value(checkpoint.figures)) for metric in columns],
        ]
        for checkpoint in sorted(checkpoints, key=lambda it: (it is not choice.best, -it.accuracy.value))
    ]
    head = ["checkpoint", "accuracy", "95% interval", *compared, "pairs", *[metric.label for metric in columns]]
    table = Table("Every checkpoint, the best first", head, rows, kept=int(len(rows) > 1))
    return Section("checkpoints", "Checkpoints", "", [], [table], _of_differences(choice))


def _of_differences(choice: Choice) -> str:
    """Return what the differences between checkpoints mean, and which these pairs would show."""
    tests = list(choice.behind.values())
    if not tests:
        return choice.unlike and f"{choice.unlike}."
    sizes = sorted(test.detectable for test in tests if not np.isnan(test.detectable))
    between = " to ".join(points(size) for size in (*sizes[:1], *sizes[1:][-1:]))
    seen = f"They show one of {between} points four times in five; a smaller one may stay unseen."
    return (
        f"Points behind are of the {tests[0].pairs:,} pairs that all have. A difference is more than chance where its "
        "interval is without zero, and there p is below 0.05: both are from exchanges within whole clusters and hold "
        f"for all differences together. {seen if sizes else 'So few clusters show none.'}"
    )


def _compared(test: PairedTest | None) -> tuple[str, str, str]:
    """Return the cells of a checkpoint that the best was tested against; its accuracies are shown in tenths, too."""
    if test is None:
        return "–", "–", "–"
    ahead = points(round(test.first_accuracy, 3) - round(test.second_accuracy, 3))
    _, low, high, *_ = test.difference
    ends = "–" if np.isnan(low) else f"{points(low)} to {points(high)}"
    return ahead, ends, "< 0.001" if test.p_value < 0.001 else f"{test.p_value:.3f}"


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


def of_outputs(outputs: Outputs, rows: Sequence[Mapping[str, Any]]) -> Section:
    """Show how far each output of each row agrees with what people say of it."""
    found = [(row, it, row["outputs"][it.name]) for row in rows for it in outputs if it.name in row["outputs"]]
    names = [name for name in (*FIGURES, *COUNTS) if any(name in of for _, _, of in found)]
    several = len(rows) > 1
    cells = [
        [f"{row['checkpoint']}: {it.name}" if several else it.name, it.written(), *(_figure(of.get(n)) for n in names)]
        for row, it, of in found
    ]
    head = ["output", "kind", *(name.replace("_", " ") for name in names)]
    table = Table("Each output" + several * ", of the best checkpoint first", head, cells)
    text = "Intervals hold for other prompts, so that answers to a single one have none."
    changes = _of_changes(rows[0].get("altered_outputs", {}))
    return Section("outputs", "Outputs", text, tables=[table, *([changes] if changes.rows else [])])


def _of_changes(outputs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show what each output of a row loses under each intervention, and how far its values move."""
    rows = []
    for output, changes in outputs.items():
        for name, of in changes.items():
            lost, moved = Estimate(**of["lost"]), Estimate(**of["moved"])
            said = audit.state_of_output(name, lost, moved)
            cells = [INTERVENTIONS[name].view, said, _figure(of["lost"]), _figure(of["moved"]), f"{moved.n:,}"]
            rows.append([output, *cells])
    head = ["output", "what was changed", "finding", "lost", "moved", "answers"]
    caption = (
        "What each output rests on: the rank correlation with ratings, or else the accuracy, that is lost, and by how "
        f"many standard deviations its values rise. A part that is gone counts from {MARGIN} lost, anything else from "
        f"{audit.MOVED} moved, each by its own interval"
    )
    return Table(caption, head, rows)


def _figure(figure: Any) -> str:
    if not isinstance(figure, Mapping):
        return "–" if figure is None else number(figure, 0 if isinstance(figure, int) else 3)
    value, low, high = (number(figure[part]) for part in ("value", "low", "high"))
    return value if low == "–" else f"{value} ({low} to {high})"


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
    head = ["what was changed", "finding", "as it is", "changed", "points lost", "95% interval", "would have seen"]
    rows = [
        [
            audit.changed(finding),
            audit.state(finding),
            percent(round(finding.left.value, 3) + round(finding.loss.value, 3)),  # so that they add up
            percent(finding.left.value),
            points(finding.loss.value),
            "–" if np.isnan(finding.loss.low) else f"{points(finding.loss.low)} to {points(finding.loss.high)}",
            points(finding.detectable),
            f"{finding.loss.n:,}",
        ]
        for finding in best.audit
    ]
    table = Table("Points of accuracy lost; below zero, gained", [*head, "pairs"], rows)
    text = "" if scored else "Not measured: evaluate with interventions."
    text += " ".join(f"{audit.changed(finding)}: {finding.reason}" for finding in best.audit if finding.reason)
    for reason in dict.fromkeys(limits.values()):
        views = (INTERVENTIONS[name].view for name, its_reason in limits.items() if its_reason == reason)
        text += f" Not tried: {', '.join(views)} ({reason})."
    method = (
        f"A change counts where it is shown to be above {100 * MARGIN:.0f} points, as none where it is shown to be "
        f"below; otherwise the data cannot tell. {TOGETHER:.0%} is the risk that any finding is wrong, all together. "
        "Without its part, a model that uses it falls to the accuracy that the rest allows, 50% where that tells "
        "nothing; below 50%, what takes its place favours the rejected answer."
    )
    elsewhere, lost = (best.figures[name]["value"] for name in ("swapped_prompt_margin", "prompt_reliance"))
    if not np.isnan(elsewhere):
        method += (
            f" Under another row's prompt, where neither answer should win, the mean margin is {number(elsewhere)} "
            f"instead of {number(elsewhere + lost)}."
        )
    return Section("reliance", title, text.strip(), drawings, [table] if rows else [], method)


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
    if not drawings:
        return Section("categories", "By category", "No row has a category.")
    return Section("categories", "By category", "", drawings, tables, text)


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
    """Show what margins and scores go along with: no finding, as the better answer may well be the longer one."""
    title = "What does it go along with?"
    metrics = (metric for metric in METRICS.values() if metric.label and not metric.column)
    found = {metric.label: best.share(metric.name) for metric in metrics}
    rows = [
        [name, number(it.value, 2), f"{number(it.low, 2)} to {number(it.high, 2)}", f"{it.n:,}"]
        for name, it in found.items()
        if not np.isnan(it.value)
    ]
    sides = {f"chosen {side}": best.share(f"accuracy_chosen_{side}") for side in ("longer", "shorter")}
    sides = {name: share for name, share in sides.items() if share.n}
    tables = [Table("Rank correlations", ["of", "correlation", "95% interval", "values"], rows)] if rows else []
    if not sides:
        nothing = "No two answers are known to differ in length or image size, nor prompts in images."
        return Section("shortcuts", title, "" if tables else nothing, [], tables)
    baseline = percent(best.figures["length_baseline_accuracy"]["value"])
    text = f"Always taking the longer answer would be right in {baseline}."
    alt = "Accuracy where " + ", ".join(f"{name}: {percent(share.value)}" for name, share in sides.items()) + "."
    caption = "A model that prefers length is right where the chosen answer is longer, and wrong where it is shorter."
    drawing = Drawing("length_accuracy", plots.intervals(sides, best.accuracy.value), alt, caption)
    return Section("shortcuts", title, text, [drawing], tables)


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
