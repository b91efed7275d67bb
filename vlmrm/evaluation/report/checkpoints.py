"""The scored pairs of a report, checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.errors import ConfigError, DataError
from vlmrm.evaluation.analysis import analyse, figures
from vlmrm.evaluation.pairs import COLUMNS, margins_of, not_finite, read_pairs
from vlmrm.evaluation.report.figures import Share
from vlmrm.evaluation.report.parts import accuracy_share

NEEDED = ("model", "checkpoint", *COLUMNS)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint's pairs: `pairs` are those with a preference, `rows` all."""

    model: str
    name: str
    label: str
    rows: pd.DataFrame

    @cached_property
    def pairs(self) -> pd.DataFrame:
        return self.rows[~self.rows["tie"].to_numpy(dtype=bool)]

    @cached_property
    def margins(self) -> np.ndarray:
        return margins_of(self.pairs)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What `vlmrm.evaluation.analysis.figures` says of all its pairs."""
        return figures(self.rows)

    @cached_property
    def groups(self) -> dict[str, Any]:
        """The same by category and by each column of `group_by`."""
        return analyse(self.rows)

    @property
    def accuracy(self) -> Share:
        return accuracy_share(self.figures)

    def ablated(self, ablation: str) -> Share:
        """Accuracy under the ablation; n is 0 where it was not scored."""
        column = f"{ablation}_chosen"
        return self.share(f"{ablation}_accuracy", int(self.pairs[column].count()) if column in self.pairs else 0)

    def share(self, name: str, n: int) -> Share:
        """One of the estimates of `figures`, over n pairs."""
        found = self.figures[name]
        return Share(found["value"], found["low"], found["high"], n)

    @property
    def step(self) -> float:
        return float(self.rows["step"].iloc[0]) if "step" in self.rows else float("nan")


def read_frames(sources: Sequence[pd.DataFrame | str | Path]) -> list[pd.DataFrame]:
    """Frames as they are; paths as the `.scores.parquet` that they name, or that lies beside the results they name.

    Raises:
        ConfigError: when there is none, or no source at all.
        DataError: when it cannot be read.
    """
    if not sources:
        raise ConfigError("there is nothing to report: name the output_file of at least one evaluation.")
    return [source if isinstance(source, pd.DataFrame) else _read(Path(source)) for source in sources]


def scores_path(path: Path) -> Path:
    """The scored pairs of a results file: itself, or what lies beside the table or its details."""
    return path if path.suffix == ".parquet" else path.with_suffix(".scores.parquet")


def _read(path: Path) -> pd.DataFrame:
    file = scores_path(path)
    if not file.is_file():
        raise ConfigError(f"there is no {file}: give the output_file of an evaluation, or its .scores.parquet.")
    return read_pairs(file)


def split(frames: Sequence[pd.DataFrame]) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints of all frames, in order of model and step, and a sentence for each that cannot be shown.

    Raises:
        ConfigError: when a checkpoint is in two frames.
        DataError: when a frame lacks a column, or no checkpoint can be shown.
    """
    found: dict[tuple[str, str], pd.DataFrame] = {}
    for frame in frames:
        missing = [name for name in NEEDED if name not in frame]
        if missing:
            raise DataError(f"the scored pairs have no column {', '.join(missing)}: make them with vlmrm eval.")
        for (model, name), rows in frame.groupby(["model", "checkpoint"], sort=False):  # ty: ignore[not-iterable]
            key = (str(model), str(name))
            if key in found:
                raise ConfigError(f"{model}/{name} is in two of the results: give each checkpoint once.")
            found[key] = rows
    labels = _labels(list(found))
    shown, left_out = [], []
    for key, rows in found.items():
        one = Checkpoint(*key, labels[key], rows)
        bad = not_finite(rows)
        if bad.any():
            left_out.append(f"{labels[key]} is left out: {int(bad.sum()):,} of its pairs have no finite score.")
        elif not len(one.pairs):
            left_out.append(f"{labels[key]} is left out: it has no pair with a preference.")
        else:
            shown.append(one)
    if not shown:
        raise DataError(f"there is nothing to report: {' '.join(left_out) or 'the results hold no scored pair.'}")
    models = list(dict.fromkeys(one.model for one in shown))
    shown.sort(key=lambda one: (models.index(one.model), one.step if one.step == one.step else np.inf))
    return shown, left_out


def _labels(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The shortest names that tell checkpoints apart: without the model where there is one, else its last folder."""
    models = {model for model, _ in keys}
    short = {model: Path(model).name or model for model in models}
    if len(set(short.values())) < len(models):
        short = {model: model for model in models}
    return {(model, name): name if len(models) == 1 else f"{short[model]}/{name}" for model, name in keys}
