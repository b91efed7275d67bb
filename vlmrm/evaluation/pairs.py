"""What the statistics read from the frame of scored pairs of one checkpoint (see `vlmrm.evaluation.frame`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from vlmrm.errors import DataError

COLUMNS = (
    *("comparison_id", "pair", "prompt_id", "tie", "weight"),
    *(f"{side}_{what}" for side in ("chosen", "rejected") for what in ("branch", "rating", "score")),
)


class Candidates(NamedTuple):
    """Every branch of every comparison once: scores[B], ratings[B], and groups[B], the number of its comparison."""

    scores: np.ndarray
    ratings: np.ndarray
    groups: np.ndarray


def read_pairs(file: Path) -> pd.DataFrame:
    """The scored pairs of a sweep.

    Raises:
        DataError: when they cannot be read.
    """
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as scored pairs ({error}): delete it and evaluate again.") from error


def check_pairs(frame: pd.DataFrame) -> None:
    """Refuses what has no figures.

    Raises:
        DataError: for no rows, a missing column, rows of several checkpoints, or a score that is no finite number,
            naming its comparison.
    """
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise DataError(f"the scored pairs have no column {missing[0]}: evaluate the checkpoint again")
    if frame.empty:
        raise DataError("there are no scored pairs: check the evaluation data")
    names = [name for name in ("model", "checkpoint") if name in frame]
    sources = frame[names].drop_duplicates() if names else ()
    if len(sources) > 1:
        raise DataError(f"the scored pairs are of {len(sources)} checkpoints: take the rows of one")
    bad = not_finite(frame)
    if bad.any():
        first = frame["comparison_id"].to_numpy()[bad][0]
        raise DataError(
            f"{bad.sum()} scored pairs have a score that is no finite number, the first in comparison {first}: "
            "the checkpoint is broken or its dtype too narrow"
        )


def not_finite(frame: pd.DataFrame) -> np.ndarray:
    """Whether a score of the pair is no finite number: [N]."""
    return ~np.isfinite(frame[["chosen_score", "rejected_score"]].to_numpy(dtype=np.float64)).all(axis=1)


def margins_of(frame: pd.DataFrame) -> np.ndarray:
    """Score of the chosen minus that of the rejected, NaN where people tied: [N]."""
    margins = frame["chosen_score"].to_numpy(np.float64) - frame["rejected_score"].to_numpy(np.float64)
    return np.where(frame["tie"].to_numpy(bool), np.nan, margins)


def credits_of(margins: np.ndarray) -> np.ndarray:
    """1 for each margin above zero, a half for each at zero, NaN for NaN: their mean is the accuracy: [N]."""
    return np.where(np.isnan(margins), np.nan, (margins > 0) + 0.5 * (margins == 0))


def pair_index(frame: pd.DataFrame) -> pd.MultiIndex:
    """A key of each row that is the same in the frames of other checkpoints of the same data.

    A comparison that the data repeat, for its weight, has one key for each repetition.
    """
    keys = frame[["comparison_id", "prompt_id", "pair", "chosen_branch"]]
    repetition = keys.groupby(list(keys), sort=False).cumcount().rename("repetition")
    return pd.MultiIndex.from_frame(pd.concat([keys, repetition], axis=1))


def comparison_numbers(frame: pd.DataFrame) -> np.ndarray:
    """The number of each row's comparison, in order of appearance: [N]."""
    index = pair_index(frame).droplevel(["pair", "chosen_branch"])
    return pd.factorize(index)[0]


def candidates_of(frame: pd.DataFrame) -> Candidates:
    """The branches behind the pairs of `frame`."""
    numbers = comparison_numbers(frame)
    sides = [
        pd.DataFrame(
            {"group": numbers} | {what: frame[f"{side}_{what}"].to_numpy() for what in ("branch", "score", "rating")}
        )
        for side in ("chosen", "rejected")
    ]
    table = pd.concat(sides).drop_duplicates(["group", "branch"])
    columns = (table[name].to_numpy(np.float64) for name in ("score", "rating"))
    return Candidates(*columns, table["group"].to_numpy())
