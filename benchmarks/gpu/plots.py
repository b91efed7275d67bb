"""Figures of the page, from the rows of the parts. A part whose rows a figure needs and lacks has none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from benchmarks.gpu.steps import UTILISATION
from vlmrm.measures.plots import CHOSEN, INK, MUTED, REJECTED, SERIES, canvas

Rows = Sequence[Mapping[str, Any]]


def utilisation(rows: Rows) -> Figure | None:
    """Draw the MFU of steps by pairs of a row, with and without checkpointing."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if match := re.fullmatch(r"(\w+) (\d+) pairs?, (.*): MFU", row["case"]):
            lines[f"{match[1].upper()}, {match[3]}"].append((int(match[2]), row["measured"]))
    if not lines:
        return None
    figure, axes = canvas()
    for colour, (name, points) in zip(SERIES, lines.items(), strict=False):
        axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", ms=5, label=name)
    goal = UTILISATION["checkpointing"]
    axes.axhline(goal, color=MUTED, linestyle=":", linewidth=1.2, label=f"goal at 3B, compiled, {goal:.0%}")
    axes.set(xlabel="pairs in a row", ylabel="MFU", xscale="log")
    plain_ticks(axes, sorted({x for points in lines.values() for x, _ in points}))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.legend(loc="outside upper left")
    return figure


def ratios(rows: Rows) -> Figure | None:
    """Draw the time of padded rows over ours, and what the operations alone would give."""
    shown = [row for row in rows if row["case"].endswith(": ratio") and row["measured"]]
    if not shown:
        return None
    names = [row["case"].removesuffix(": ratio") for row in shown]
    figure, axes = canvas(height=1.2 + 0.32 * len(shown))
    axes.barh(names, [row["measured"] for row in shown], color=CHOSEN, height=0.55, label="measured")
    axes.plot([row["bound"] for row in shown], names, "|", color=INK, ms=14, mew=2, label="by operations")
    axes.axvline(1, color=MUTED, linewidth=1.2)
    axes.set(xlabel="time of padded rows, over ours")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def row_lengths(rows: Rows) -> Figure | None:
    """Draw the tokens a second by the tokens of a row."""
    kinds = {"pairs of 1k tokens": "row ", "one pair": "one "}
    figure, axes = canvas()
    drawn = []
    for (name, start), colour in zip(kinds.items(), (CHOSEN, REJECTED), strict=True):
        points = [
            (row["our_tokens"], row["measured"]) for row in rows if row["case"].startswith(start) and row["measured"]
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", ms=5, label=name)
            drawn += [tokens for tokens, _ in points]
    if not drawn:
        return None
    axes.set(xlabel="tokens of the row", ylabel="tokens a second, forward and backward", xscale="log")
    plain_ticks(axes, sorted(set(drawn)), thousands=True)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return figure


def errors(rows: Rows) -> Figure | None:
    """Draw the error of each kernel and case, and the limit."""
    shown = [row for row in rows if row["measured"] and row["sense"] == "<="]
    if not shown:
        return None
    figure, axes = canvas(height=1.0 + 0.2 * len(shown))
    names = [row["case"] for row in shown]
    colours = [CHOSEN if row["measured"] <= row["target"] else REJECTED for row in shown]
    axes.scatter([row["measured"] for row in shown], names, color=colours, s=26, zorder=3)
    axes.axvline(shown[0]["target"], color=MUTED, linestyle=":", linewidth=1.2)
    axes.set(xlabel="largest error, of the size (dotted: limit)", xlim=(0, None))
    axes.tick_params(axis="y", labelsize=8.5)
    axes.invert_yaxis()
    return figure


def memory(rows: Rows) -> Figure | None:
    """Draw the peak memory of each training, or where it is not known the seconds of a step."""
    shown = [row for row in rows if row["measured"]]
    if not shown:
        return None
    known = all(row["peak_gib"] for row in shown)
    figure, axes = canvas(height=1.0 + 0.34 * len(shown))
    values = [row["peak_gib"] if known else row["measured"] for row in shown]
    axes.barh([row["case"] for row in shown], values, color=CHOSEN, height=0.55)
    axes.set(xlabel="peak memory, GiB" if known else "seconds of a step")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure


def latencies(rows: Rows) -> Figure | None:
    """Draw latencies by the number of clients."""
    shown = [row for row in rows if row.get("clients") and row["measured"]]
    if not shown:
        return None
    figure, axes = canvas()
    clients = [row["clients"] for row in shown]
    for name, label, colour in (("p50_ms", "half are faster", CHOSEN), ("p99_ms", "99 % are faster", REJECTED)):
        axes.plot(clients, [row[name] for row in shown], color=colour, marker="o", ms=5, label=label)
    axes.set(xlabel="clients at the same time", ylabel="latency, ms", xscale="log", yscale="log")
    plain_ticks(axes, clients)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.legend(loc="upper left")
    return figure


def plain_ticks(axes: Any, values: Sequence[float], thousands: bool = False) -> None:
    """Mark these values alone on a logarithmic axis."""
    axes.set_xticks(
        values, [f"{value / 1000:.0f}k" if thousands and value >= 1000 else f"{value:g}" for value in values]
    )
    axes.minorticks_off()


FIGURES: dict[str, Sequence[Callable[[Rows], Figure | None]]] = {
    "kernels": (errors,),
    "steps_3b": (utilisation, ratios),
    "steps_7b": (utilisation, ratios),
    "lengths": (row_lengths,),
    "training": (memory,),
    "service": (latencies,),
}
