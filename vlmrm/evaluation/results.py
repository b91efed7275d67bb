"""The results of a sweep as files, each replaced atomically: a table, its details, and the scored pairs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.evaluation.entry import Entry
from vlmrm.evaluation.public import published_table
from vlmrm.evaluation.schema import SCHEMA_VERSION, Best, Figures, Row, dump_results, load_results
from vlmrm.files import atomic_write, make_folder, write_file
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.outputs import TOTAL, Reference
from vlmrm.measures.pairs import PairArrays, candidates_of, read_pairs
from vlmrm.outputs import COUNTS

# The columns that the framework's specification names.
FIRST = ["preference_accuracy", "average_margin", "margin_std", "sample_count"]


class Results:
    """The table (.csv), its details (.json) and all scored pairs (.scores.parquet), written after each checkpoint."""

    def __init__(self, csv: Path, settings: dict[str, Any], set_name: str | None = None):
        self.csv, self.json, self.parquet = csv, csv.with_suffix(".json"), csv.with_suffix(".scores.parquet")
        self.settings, self.set_name = settings, set_name
        self.leakage: dict[str, Any] | None = None
        self.rows: list[Row] = []
        self.best: Best | None = None
        self.frame: pd.DataFrame | None = None
        self.references: dict[str, dict[str, Reference]] = {}  # by path and output, of what this sweep has scored
        make_folder(csv.parent)
        if not self.json.exists():
            return
        saved = load_results(self.json)
        if digest(saved["settings"]) != digest(settings):
            if all(row["error"] for row in saved["results"]):
                return  # nothing to lose, and maybe the settings were what was wrong
            old, new = ({**it, **it.get("reading", {})} for it in (saved["settings"], settings))
            changed = sorted(key for key in {*old, *new} - {"reading"} if digest(old.get(key)) != digest(new.get(key)))
            raise ConfigError(
                f"{self.json} holds results of other data or settings ({', '.join(changed)}): choose another "
                "output_file."
            )
        self.rows, self.best = saved["results"], saved["best"]
        if self.parquet.exists():
            self.frame = read_pairs(self.parquet)

    def references_of(self, best: Best) -> dict[str, Reference]:
        """Return the scores of a checkpoint by output; of an earlier sweep those of its pairs alone, or none."""
        several = any("outputs" in row for row in self.rows if row["path"] == best["path"])
        if best["path"] in self.references or self.frame is None or several:
            return self.references.get(best["path"], {})
        pairs = self.frame[_of(self.frame, best)]
        return {TOTAL: Reference(candidates_of(pairs).scores, PairArrays(pairs).decided)}

    def holds(self, entry: Entry) -> bool:
        """Return whether the entry has figures, with the pairs behind them, and is known to be still the same."""
        row = next((row for row in self.rows if row["path"] == entry.path and not row["error"]), None)
        if row is None:
            return False
        try:
            current = entry.digest()
        except CheckpointError:
            return False  # opening it raises the same error
        paired = "preference_accuracy" not in row or (self.frame is not None and bool(_of(self.frame, row).any()))
        return current is not None and current == row["provenance"]["weights"] and paired

    def add(self, row: Row, frame: pd.DataFrame | None) -> None:
        """Add a checkpoint's row, and its scored pairs, in place of earlier ones of its path or its names.

        A row without pairs leaves none behind: they would be of other weights.
        """
        names = (row["model"], row["checkpoint"])
        differ = (it for it in self.rows if it["path"] != row["path"] and (it["model"], it["checkpoint"]) != names)
        self.rows = [*differ, row]
        if self.frame is not None:
            self.frame = self.frame[~_of(self.frame, row)]
        if frame is not None:
            self.frame = frame if self.frame is None else pd.concat([self.frame, frame], ignore_index=True)

    def write(self) -> None:
        """Write all three files; one process calls it."""
        if self.frame is not None:
            with atomic_write(self.parquet) as temporary:
                self.frame.to_parquet(temporary, index=False)
        self.write_tables()

    def write_tables(self) -> None:
        """Write the table and its details, the files that depend on `best`."""
        write_file(
            self.json,
            dump_results(
                {
                    "schema_version": SCHEMA_VERSION,
                    **({} if self.set_name is None else {"set_name": self.set_name}),
                    "settings": self.settings,
                    "leakage": self.leakage,
                    "best": self.best,
                    "results": self.rows,
                }
            ),
        )
        write_file(self.csv, table(self.rows, self.best).to_csv(index=False))


def _of(frame: pd.DataFrame, row: Row | Best) -> pd.Series:
    """Return whether each pair is one of the row's checkpoint: bool [N]."""
    return (frame["model"] == row["model"]) & (frame["checkpoint"] == row["checkpoint"])


def table(rows: Sequence[Row], best: Best | None) -> pd.DataFrame:
    """Return the table: a row for each checkpoint, and a column `accuracy/CATEGORY` for each category."""
    flat = []
    for row in rows:
        line = {name: value for name, value in row.items() if name != "path" and not isinstance(value, dict)}
        for output, figures in row.get("outputs", {}).items():
            line |= {f"{output}_{name}": number_of(figure) for name, figure in figures.items()}
        if "statistics" in row:
            overall = row["statistics"]["overall"]
            for name in (name for it in INTERVENTIONS if (name := f"{it}_accuracy") in row):
                line |= {f"{name}/{part}": overall[name][part] for part in ("low", "high", "n")}
            for name, figures in row["statistics"]["category"].items():
                line[f"accuracy/{name}"] = figures["preference_accuracy"]["value"]
        if "provenance" in row:
            line["weights"] = row["provenance"]["weights"]
        for name, figure in row.get("benchmark", {}).items():
            line[f"benchmark/{name}"] = figure["value"]
        if "limits" in row:
            line["limits"] = ", ".join(row["limits"])
        line["best"] = best is not None and row["path"] == best["path"]
        flat.append(line)
    frame = pd.DataFrame(flat)
    tabled = [metric for metric in METRICS.values() if metric.column]
    measured = [metric.name for metric in tabled if not metric.needs and metric.name not in FIRST]
    needing = [metric.name for metric in tabled if metric.needs]
    columns = ["model", "checkpoint", *FIRST, "error", *measured, "dropped_rows", *needing, "seconds"]
    present = [name for name in columns if name in frame or name in FIRST]
    return frame.reindex(columns=[*dict.fromkeys([*present, *frame.columns])])


def table_figures(overall: Figures) -> dict[str, float]:
    """Return the figures of the table by name, without metrics whose column the pairs lack."""
    tabled = {metric: metric.value(overall) for metric in METRICS.values() if metric.column}
    return {metric.name: value for metric, value in tabled.items() if not (metric.needs and math.isnan(value))}


def number_of(figure: Any) -> float:
    """Return a figure of an output without its interval."""
    return figure["value"] if isinstance(figure, dict) else figure


def describe(row: Any) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    of_outputs = [
        f"{output} " + ", ".join(f"{name} {number_of(it):.3f}" for name, it in figures.items() if name not in COUNTS)
        for output, figures in row.get("outputs", {}).items()
    ]
    if "preference_accuracy" not in row:
        return "; ".join(of_outputs)
    equal = f" ({row['score_ties']} of {row['sample_count']} pairs have equal scores)" if row["score_ties"] else ""
    blank = ""
    if "blank_image_accuracy" in row:
        pairs = row["statistics"]["overall"]["blank_image_accuracy"]["n"]
        of = f" (of {pairs} pairs)" if pairs != row["sample_count"] else ""
        blank = f", with blank images {row['blank_image_accuracy']:.3f}{of}"
    orders = f", the same in both orders {row['position_consistency']:.3f}" if "position_consistency" in row else ""
    accuracy = f"accuracy {row['preference_accuracy']:.3f}{equal}{blank}{orders}, margin {row['average_margin']:.3f}"
    return "; ".join([accuracy, *of_outputs])


def beside_published(name: str, row: Row) -> str:
    """Return the checkpoint's figures on a public benchmark above those that others published, with their sources."""
    measured = {figure: Estimate(**parts) for figure, parts in row["benchmark"].items()}
    rows = published_table(name, measured, f"{row['model']}/{row['checkpoint']}")
    cells = [{column: _short(cell) for column, cell in line.items()} for line in rows]
    return pd.DataFrame(cells).to_string(index=False)


def _short(cell: str | Estimate | float | None) -> str:
    if isinstance(cell, Estimate):
        return f"{cell.value:.3f}" + ("" if math.isnan(cell.low) else f" ({cell.low:.3f}-{cell.high:.3f})")
    if cell is None or isinstance(cell, str):
        return cell or ""
    return f"{cell:.3f}"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
