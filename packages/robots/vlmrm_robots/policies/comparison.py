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
    return pd.DataFrame(rows).astype(dict.fromkeys(names, "Int64") | {"false_positive_share": "float64"})


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
        "| reward | true success rate | lowest to highest | rewarded steps | of them without success | missed |",
        "|---|---|---|---|---|---|",
        f"| none: random actions | {summary['random_success_rate']:.1%} | | | | |",
    ]
    for source, figures in summary["sources"].items():
        counts = "| |"
        if rewards := figures["learned_rewards"]:
            share = f" ({rewards['false_positive_share']:.2%})" if rewards["rewarded"] else ""
            counts = f"{rewards['rewarded']:,} | {rewards['false_positives']:,}{share} | {rewards['missed']:,}"
        rate = f"{figures['true_success_rate']:.1%} | {figures['lowest']:.1%} to {figures['highest']:.1%}"
        lines.append(f"| {NAMES[source]} | {rate} | {counts} |")
    if summary["unqualified_because"]:
        lines += ["", f"The classifier does not qualify as a reward: {summary['unqualified_because']}."]
    return "\n".join(lines) + "\n"


def _draw(table: pd.DataFrame, summary: dict[str, Any], folder: Path) -> None:
    """Draw the true success rate, and below it the share of rewards without a success: means over the seeds."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(6.0, 5.2), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        columns = {"true_success_rate": "true success rate", "false_positive_share": "rewards without\nsuccess, share"}
        for axes, (column, label) in zip(panels, columns.items(), strict=True):
            for source, colour in zip(NAMES, SERIES, strict=False):  # the mean, and a band from lowest to highest
                values = table[table["source"] == source].groupby("steps")[column].agg(["mean", "min", "max"])
                if values["mean"].any() or (column == "true_success_rate" and len(values)):
                    line = {"color": colour, "linestyle": DASHES[source], "label": NAMES[source]}
                    axes.plot(values.index, values["mean"], marker="o", markersize=3, **line)
                    axes.fill_between(values.index, values["min"], values["max"], color=colour, alpha=0.15, lw=0)
            axes.set_ylabel(label)
        panels[0].axhline(summary["random_success_rate"], color=MUTED, linestyle=":", label="random actions")
        panels[0].set(ylim=(-0.03, 1.03), title=f"{summary['env']}: what each reward taught")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        panels[1].set_ylim(bottom=0)
        panels[1].set_xlabel("steps of training")
        panels[1].xaxis.set_major_formatter("{x:,.0f}")
        save(figure, folder, "comparison")
