"""Plots of arrays as matplotlib figures, in one set of named colours. Nothing is computed here.

A figure is drawn once, in the light colours. In a page each colour becomes a CSS variable, so that figures follow the
reader's choice of light or dark.
"""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vlmrm.files import atomic_write, write_file
from vlmrm.measures.intervals import Estimate

BINS = 48
LINES = 3  # of the name of a row
# name: (light, dark). Text and lines keep a contrast of at least 4.5 to their paper; grid and band are decoration.
COLOURS = {
    "paper": ("#fefefe", "#16181d"),
    "ink": ("#1d2127", "#e8eaee"),
    "muted": ("#5a6270", "#a3abb8"),
    "grid": ("#e3e6eb", "#2d323b"),
    "chosen": ("#1a5fb0", "#7db4f7"),
    "rejected": ("#b54a08", "#f4a261"),
    "second": ("#2c7a4b", "#71cf9a"),
    "third": ("#8a3fa0", "#d59be6"),
    "fourth": ("#8a6100", "#dcbb52"),
    "fifth": ("#b3265e", "#f590b5"),
}
INK, MUTED, GRID, CHOSEN, REJECTED, PAPER = (
    COLOURS[name][0] for name in ("ink", "muted", "grid", "chosen", "rejected", "paper")
)
SERIES = [COLOURS[name][0] for name in ("chosen", "rejected", "second", "third", "fourth", "fifth")]
WIDTH = 5.0  # inches: on a phone the text of a figure is about as large as that of the page
OTHER_SCRIPTS = ("Noto Sans CJK SC", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Emoji")  # where installed
RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small files, and the page's own font
    "font.family": ["DejaVu Sans"],
    "font.size": 10.5,
    "legend.fontsize": 9.5,
    "text.parse_math": False,  # a category named "$5" is no formula
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def canvas(height: float = 3.1) -> tuple[Figure, Axes]:
    """Return an empty figure of `WIDTH` by that many inches; drawn inside `drawing()`, it has the report's style."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


@contextmanager
def drawing() -> Generator[None]:
    """Apply the style to all figures drawn and saved inside; characters without a font are boxes in the PNG."""
    fonts = [*RC["font.family"], *(name for name in OTHER_SCRIPTS if name in get_font_names())]
    with mpl.rc_context({**RC, "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        yield


def save(figure: Figure, folder: Path, name: str) -> str:
    """Write `name.svg` and `name.png` to `folder`; return the SVG element for the page."""
    with mpl.rc_context({"svg.hashsalt": name}):  # equal data make equal files
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        save_png(figure, folder / f"{name}.png")
    write_file(folder / f"{name}.svg", svg := buffer.getvalue())
    return _inline(svg, name)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def css_variables(dark: bool) -> str:
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())


def _inline(svg: str, name: str) -> str:
    """Return the element alone, with colours as variables, ids of its own, and no fixed width."""
    # Without matplotlib's <style>, which the page's policy refuses and its own style has.
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([^;]*?)px [^;\"]*", r"font-size: \1px", svg)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", svg, count=2)


class Curve(NamedTuple):
    """One model's accuracy at each of its checkpoints, in order of step."""

    label: str
    steps: Sequence[float]
    accuracies: Sequence[Estimate]


def accuracy_by_step(curves: Sequence[Curve], best: tuple[float, float] | None) -> Figure:
    """Draw a line with its band for each model; `best` is the (step, accuracy) to mark, None without a step."""
    figure, axes = canvas(height=3.1 + 0.2 * len(curves))
    dashes = ["-", "--", ":", "-."]
    for number, (label, steps, accuracies) in enumerate(curves):
        colour = SERIES[number % len(SERIES)]
        values, lows, highs, *_ = zip(*accuracies, strict=True)
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.16, linewidth=0)
        axes.plot(
            steps, values, dashes[number // len(SERIES) % 4], color=colour, marker="o", ms=4, label=_short(label, 56)
        )
    if best is not None:
        axes.plot(*best, marker="o", ms=11, mfc="none", mec=INK, mew=1.6, linestyle="none", label="best")
    axes.set(xlabel="training step", ylabel="accuracy")
    fine = axes.get_ylim()[1] - axes.get_ylim()[0] < 0.05
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=int(fine)))
    figure.legend(loc="outside upper left")  # names of trainings are long
    return figure


def learning_curves(history: Sequence[Mapping[str, float]]) -> Figure:
    """Draw loss and accuracy over steps from a training's log: batches as a line, evaluations as dots on one."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, name, chance in zip(panels, ("loss", "accuracy"), (np.log(2), 0.5), strict=True):
        axes.axhline(chance, color=MUTED, linewidth=1, linestyle=":", label="chance")
        for key, colour, marker in ((name, CHOSEN, ""), (f"eval_{name}", REJECTED, "o")):
            entries = [entry for entry in history if key in entry and ("loss" in entry or key.startswith("eval_"))]
            if entries:
                label = "evaluation" if marker else "training batches"
                steps, values = [entry["step"] for entry in entries], [entry[key] for entry in entries]
                axes.plot(steps, values, color=colour, marker=marker, ms=4, label=label)
        axes.set_ylabel(name)
    panels[1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panels[1].set_xlabel("training step")
    panels[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure


def score_histograms(chosen: np.ndarray, rejected: np.ndarray) -> Figure:
    """Draw the scores of the chosen[N] and rejected[N] answers over the same bins."""
    figure, axes = canvas()
    edges = np.histogram_bin_edges(np.concatenate([chosen, rejected]), BINS).tolist()
    for scores, colour, label in ((rejected, REJECTED, "rejected"), (chosen, CHOSEN, "chosen")):
        axes.hist(scores, edges, color=colour, alpha=0.35, label=label)
        axes.hist(scores, edges, color=colour, histtype="step", linewidth=1.6)
        axes.axvline(float(scores.mean()), color=colour, linestyle="--", linewidth=1.2)
    axes.set(xlabel="score (dashed: mean)", ylabel="answers")
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.legend()
    return figure


def margin_distribution(margins: np.ndarray, below: float) -> Figure:
    """Draw margins[N] with those below zero, a share of `below`, in another colour."""
    figure, axes = canvas()
    # Zero is an edge, so that no bar is of both signs; the outermost thousandths would squeeze the rest.
    low, high = np.quantile(margins, [0.001, 0.999])
    low, high = min(low, 0.0), max(high, 0.0)
    width = (high - low) / BINS or 1.0
    edges = (width * np.arange(np.floor(low / width), np.floor(high / width) + 2)).tolist()
    clipped = np.clip(margins, edges[0], edges[-1])
    axes.hist(clipped[margins > 0], edges, color=CHOSEN, label=f"right, {1 - below:.1%}")
    axes.hist(clipped[margins <= 0], edges, color=REJECTED, label=f"not right, {below:.1%}")
    axes.axvline(0, color=INK, linewidth=1)
    axes.set(xlabel="score of the chosen − score of the rejected", ylabel="pairs")
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.legend()
    return figure


def reliability(bins: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw rows of `calibration.reliability`: probability against frequency; larger dots hold more pairs."""
    figure, axes = canvas(height=3.6)
    predicted, observed = [row["probability"] for row in bins], [row["frequency"] for row in bins]
    counts = np.array([row["count"] for row in bins])
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1.2, label="calibrated")
    axes.plot(predicted, observed, color=CHOSEN, linewidth=1.2)
    axes.scatter(predicted, observed, s=16 + 110 * counts / counts.max(), color=CHOSEN, label="this model", zorder=3)
    axes.set(xlabel="the model's probability", ylabel="how often people agreed", xlim=(0, 1), ylim=(0, 1))
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="upper left")
    return figure


def intervals(estimates: Mapping[str, Estimate], overall: float | None = None) -> Figure:
    """Draw a dot with its interval for each name, from the top; a dashed line at `overall`, a solid one at chance."""
    names = _labels([f"{name}, n\u00a0=\u00a0{share.n:,}" for name, share in estimates.items()])
    heights = np.array([0.15 + 0.17 * len(name.splitlines()) for name in names])  # of each row, in inches
    figure, axes = canvas(height=0.95 + float(heights.sum()))
    rows = np.cumsum(heights) - heights / 2
    values, lows, highs, *_ = map(np.array, zip(*estimates.values(), strict=True))
    axes.hlines(rows, lows, highs, color=CHOSEN, linewidth=2)
    axes.plot(values, rows, "o", color=CHOSEN, ms=6)
    axes.axvline(0.5, color=MUTED, linewidth=1.2)
    if overall is not None:
        axes.axvline(overall, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(rows, names)
    axes.set(ylim=(float(heights.sum()), 0), xlabel="accuracy")
    low, high = min(float(np.nanmin([lows, values])), 0.5), max(float(np.nanmax([highs, values])), 0.5)
    room = max(0.06 * (high - low), 0.02)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y", visible=False)
    return figure


def best_of_n(curve: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw rows of `ranking.best_of_n`: the expected rating of what the model, an oracle and chance pick."""
    figure, axes = canvas()
    sizes = [row["n"] for row in curve]
    oracle, model, random = ([row[kind]["value"] for row in curve] for kind in ("oracle", "model", "random"))
    lows, highs = ([row["model"][end] for row in curve] for end in ("low", "high"))
    axes.plot(sizes, oracle, color=MUTED, linestyle="--", marker=".", label="best there is")
    axes.fill_between(sizes, lows, highs, color=CHOSEN, alpha=0.16, linewidth=0)
    axes.plot(sizes, model, color=CHOSEN, marker="o", ms=4, label="picked by this model")
    axes.plot(sizes, random, color=REJECTED, linestyle=":", marker=".", label="picked at random")
    axes.set(xlabel="candidates N", ylabel="people's rating of the pick")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def _short(name: str, most: int = 28) -> str:
    """Cut `name` to `most` letters."""
    width = np.cumsum(_widths(name))
    return name if not name or width[-1] <= most else name[: int((width < most).sum())] + "…"


def _widths(text: str) -> list[int]:
    """Return the width of each letter; Chinese characters, and emoji, are as wide as two."""
    return [2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text]


def _labels(names: Sequence[str]) -> list[str]:
    """Break names into lines; of more than LINES the middle is left out, where no two become the same."""
    broken = [_lines(name) for name in names]
    short = ["\n".join(lines if len(lines) <= LINES else [lines[0] + " …", *lines[1 - LINES :]]) for lines in broken]
    unique = Counter(short)
    return [label if unique[label] == 1 else "\n".join(lines) for label, lines in zip(short, broken, strict=True)]


def _lines(name: str, most: int = 28) -> list[str]:
    """Break `name` at spaces into lines of at most `most` letters, and longer words where they reach that."""
    lines = [""]
    for word in re.split(r"[ \t\n]+", name.strip()):
        if lines[-1] and sum(_widths(f"{lines[-1]} {word}")) <= most:
            lines[-1] += f" {word}"
            continue
        lines.append(word)
        while sum(_widths(lines[-1])) > most:
            cut = int((np.cumsum(_widths(lines[-1])) <= most).sum())
            lines[-1:] = [lines[-1][:cut], lines[-1][cut:]]
    return lines[1:] or [""]
