"""What sweeps wrote beside the scored pairs of a report: which checkpoint they chose, and what they found leaked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from vlmrm.evaluation.report.checkpoints import Checkpoint, scores_path
from vlmrm.evaluation.schema import Best, ResultsFile, load_results


@dataclass(frozen=True)
class Choice:
    """The checkpoint that the report is about, and in words why.

    `leakage` is what of its data was trained on, None where that is not known; `benchmark` the name of a public one
    and the checkpoint's figures on it, None where its data are none.
    """

    best: Checkpoint
    reason: str
    leakage: dict[str, Any] | None
    benchmark: tuple[str, Mapping[str, float]] | None


def read_sweeps(sources: Sequence[pd.DataFrame | str | Path]) -> list[ResultsFile]:
    """The results (.json) beside each path that has them: frames have none, nor have pairs that came alone.

    Raises:
        ConfigError: when they cannot be read, or are of another version.
    """
    pairs = [scores_path(Path(source)) for source in sources if not isinstance(source, pd.DataFrame)]
    beside = [path.with_name(path.name.removesuffix(".parquet").removesuffix(".scores") + ".json") for path in pairs]
    return [load_results(path) for path in beside if path.is_file()]


def choose(checkpoints: Sequence[Checkpoint], sweeps: Sequence[ResultsFile]) -> Choice:
    """The checkpoint that the sweep chose; of those that several sweeps chose, or without any, the most accurate."""
    chosen = {(best["model"], best["checkpoint"]): best for sweep in sweeps if (best := sweep["best"])}
    named = [one for one in checkpoints if (one.model, one.name) in chosen]
    best = max(named or checkpoints, key=lambda one: one.accuracy.value)  # of equals the first
    reason = _reason(chosen.get((best.model, best.name)))
    if len(named) > 1:
        reason = f"the most accurate of {len(named)} that are {reason} in their results"
    name = (best.model, best.name)
    held = [(sweep, row) for sweep in sweeps for row in sweep["results"] if (row["model"], row["checkpoint"]) == name]
    if not held:
        return Choice(best, reason, None, None)
    sweep, row = held[0]
    benchmark = (sweep["settings"]["benchmark"], row["benchmark"]) if "benchmark" in row else None
    return Choice(best, reason, sweep["leakage"], benchmark)


def _reason(best: Best | None) -> str:
    if best is None:
        return "best by preference accuracy"
    metric = best["metric"].replace("_", " ")
    within = "the earliest within one standard error of the " if best["one_standard_error"] else ""
    return f"{within}best by {metric}"
