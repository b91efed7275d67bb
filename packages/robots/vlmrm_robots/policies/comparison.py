"""Compares what rewards taught: the true success rate over steps, and the share of rewards without a success."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.files import write_file, write_json
from vlmrm.measures.plots import MUTED, SERIES, drawing, save
from vlmrm_robots.frames.settings import RLSettings
from vlmrm_robots.policies.environments import Counts
from vlmrm_robots.policies.training import PolicyRun

NAMES = {"success": "true success", "learned": "learned reward", "both": "both"}
DASHES = {"success": "-", "learned": "--", "both": "-."}  # so that lines which coincide are all visible


def write_comparison(runs: Sequence[PolicyRun], settings: RLSettings) -> dict[str, Any]:
    """Write comparison.csv, .json, .md, .png and .svg to `output_dir`; return the content of the JSON."""
    folder, table = settings.output_dir, evaluations(runs)
    summary = summarise(runs, settings)
    write_file(folder / "comparison.csv", table.to_csv(index=False))
    write_json(folder / "comparison.json", summary)
    write_file(folder / "comparison.md", markdown(summary))
    _draw(table, summary, folder)
    return summary


def evaluations(runs: Sequence[PolicyRun]) -> pd.DataFrame:
    """Return a row for each evaluation; the counts since the one before are empty without a classifier."""
    names = Counts().figures()
    rows = [
        {"source": run.source, "seed": run.seed, "steps": point.steps, "true_success_rate": point.true_success_rate}
        | (dict.fromkeys(names) if run.source == "success" else point.counts.figures())
        for run in runs
        for point in run.points
    ]
    shares = ("paid", "unearned", "false_positive_share", "unearned_share")
    return pd.DataFrame(rows).astype(dict.fromkeys(names, "Int64") | dict.fromkeys(shares, "float64"))


def summarise(runs: Sequence[PolicyRun], settings: RLSettings) -> dict[str, Any]:
    """Return each source's final true success rate over the seeds, and the counts of its rewards."""
    sources = {}
    for source in settings.sources:
        source_runs = [run for run in runs if run.source == source]
        final = [run.final for run in source_runs]
        counts = sum((run.counts for run in source_runs), Counts())
        sources[source] = {
            "true_success_rate": float(np.mean(final)),
            "lowest": min(final),
            "highest": max(final),
            "steps": source_runs[0].points[-1].steps,
            "learned_rewards": None if source == "success" else counts.figures(),
        }
    return {
        "env": settings.env,
        "seeds": settings.seeds,
        "evaluation_episodes": settings.evaluation_episodes,
        "random_success_rate": float(np.mean([run.random_success_rate for run in runs])),
        "unqualified_because": next((run.unqualified_because for run in runs if run.unqualified_because), None),
        "sources": sources,
    }


def markdown(summary: dict[str, Any]) -> str:
    """Return the summary as a table."""
    lines = [
        "| reward | true success rate | lowest to highest | rewarded steps | of them without success | missed "
        "| share of all reward without success |",
        "|---|---|---|---|---|---|---|",
        f"| none: random actions | {summary['random_success_rate']:.1%} | | | | | |",
    ]
    for source, figures in summary["sources"].items():
        rate = f"{figures['true_success_rate']:.1%} | {figures['lowest']:.1%} to {figures['highest']:.1%}"
        counts = "| | |"
        if rewards := figures["learned_rewards"]:
            share, unearned = rewards["false_positive_share"], rewards["unearned_share"]
            false = f"{rewards['false_positives']:,}" + ("" if share is None else f" ({share:.2%})")
            unearned = "none" if unearned is None else f"{unearned:.2%}"
            counts = f"{rewards['rewarded']:,} | {false} | {rewards['missed']:,} | {unearned}"
        lines.append(f"| {NAMES[source]} | {rate} | {counts} |")
    if summary["unqualified_because"]:
        lines += ["", f"The classifier does not qualify as a reward: {summary['unqualified_because']}."]
    return "\n".join(lines) + "\n"


def _draw(table: pd.DataFrame, summary: dict[str, Any], folder: Path) -> None:
    """Draw the true success rate above, the share of rewards without a success below: means over the seeds."""
    from matplotlib.figure import Figure

    sources = sorted(summary["sources"], key=list(NAMES).index)
    learned = [source for source in sources if source != "success"]
    shown = {"true_success_rate": sources, **({"false_positive_share": learned} if learned else {})}
    with drawing():
        figure = Figure(figsize=(6.0, 5.2 if learned else 3.2), layout="constrained")
        heights = [2, 1][: len(shown)]
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (column, drawn) in zip(panels, shown.items(), strict=True):
            for source in drawn:  # a line of the mean, and a band from the lowest to the highest
                values = table[table["source"] == source].groupby("steps")[column].agg(["mean", "min", "max"])
                line = {"color": SERIES[list(NAMES).index(source)], "linestyle": DASHES[source]}
                axes.plot(values.index, values["mean"], label=NAMES[source], marker="o", markersize=3, **line)
                axes.fill_between(values.index, values["min"], values["max"], color=line["color"], alpha=0.15, lw=0)
        panels[0].axhline(summary["random_success_rate"], color=MUTED, linestyle=":", label="random actions")
        title = f"{summary['env']}: what each reward taught"
        panels[0].set(ylim=(-0.03, 1.03), ylabel="true success rate", title=title)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        if learned:
            panels[1].set(ylabel="rewards without\nsuccess, share")
            panels[1].set_ylim(bottom=0)
        panels[-1].set_xlabel("steps of training")
        panels[-1].xaxis.set_major_formatter("{x:,.0f}")
        save(figure, folder, "comparison")
