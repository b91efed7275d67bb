"""The results of a sweep as files, whole at any moment: a table, its details, and the scored pairs."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vlmrm.errors import ConfigError
from vlmrm.evaluation.public import table as published_table

COLUMNS = ["model", "checkpoint", "preference_accuracy", "average_margin", "margin_std", "sample_count"]


class Results:
    """The table (.csv), its details (.json) and all scored pairs (.scores.parquet), written after each checkpoint."""

    def __init__(self, csv: Path, settings: dict[str, Any]):
        self.csv, self.json, self.parquet = csv, csv.with_suffix(".json"), csv.with_suffix(".scores.parquet")
        self.settings = settings
        self.rows: list[dict[str, Any]] = []
        self.frame: pd.DataFrame | None = None
        if self.json.exists():
            self._continue()

    def _continue(self) -> None:
        try:
            saved = json.loads(self.json.read_text(encoding="utf-8"))
            same = digest(saved["settings"]) == digest(self.settings)
            self.rows = saved["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.json} is not a results file of this program: choose another output_file."
            ) from error
        if not same:
            raise ConfigError(f"{self.json} holds results of other data or settings: choose another output_file.")
        if self.parquet.exists():
            self.frame = pd.read_parquet(self.parquet)

    def done(self) -> set[str]:
        """Paths of the checkpoints with figures; those that failed are tried again."""
        return {row["path"] for row in self.rows if not row["error"]}

    def add(self, row: dict[str, Any], frame: pd.DataFrame | None, write: bool) -> None:
        """Puts a checkpoint's row, and its scored pairs, in place of earlier ones; one process writes."""
        self.rows = [other for other in self.rows if other["path"] != row["path"]] + [row]
        if frame is not None:
            earlier = self.frame
            if earlier is not None:
                same = (earlier["model"] == row["model"]) & (earlier["checkpoint"] == row["checkpoint"])
                earlier = earlier[~same]
            self.frame = frame if earlier is None else pd.concat([earlier, frame], ignore_index=True)
        if not write:
            return
        self.csv.parent.mkdir(parents=True, exist_ok=True)
        if self.frame is not None:
            # First: a row of the table without its pairs would not be evaluated again.
            temporary = self.parquet.with_name(self.parquet.name + ".tmp")
            self.frame.to_parquet(temporary, index=False)
            os.replace(temporary, self.parquet)
        details = {"settings": self.settings, "results": self.rows}
        replace_file(self.json, json.dumps(_plain(details), indent=2, default=str, allow_nan=False) + "\n")
        replace_file(self.csv, table(self.rows).to_csv(index=False))


def _plain(value: Any) -> Any:
    """The same with null for each number that is none: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One line a checkpoint, one `accuracy/CATEGORY` column a category."""
    flat = []
    for row in rows:
        line = {
            key: value for key, value in row.items() if key not in ("categories", "statistics", "benchmark", "path")
        }
        for name, figures in row.get("categories", {}).items():
            line[f"accuracy/{name}"] = figures["preference_accuracy"]
        for name, value in row.get("benchmark", {}).items():
            line[f"benchmark/{name}"] = value
        flat.append(line)
    frame = pd.DataFrame(flat)
    return frame.reindex(columns=[*COLUMNS, *[name for name in frame.columns if name not in COLUMNS]])


def describe(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"FAILED: {row['error']}"
    blank = f", with blank images {row['blank_image_accuracy']:.3f}" if "blank_image_accuracy" in row else ""
    return f"accuracy {row['preference_accuracy']:.3f}{blank}, margin {row['average_margin']:.3f}"


def beside_published(name: str, row: dict[str, Any]) -> str:
    """The checkpoint's figures on a public benchmark above those that others published, with their sources."""
    rows = published_table(name, row["benchmark"], f"{row['model']}/{row['checkpoint']}")
    return pd.DataFrame(rows).to_string(index=False, na_rep="", float_format="{:.3f}".format)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def replace_file(path: Path, text: str) -> None:
    """Writes all of `text` or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
