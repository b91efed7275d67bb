"""Scored pairs as a table: a row for each pair of answers, with all columns that metrics and the report read.

`scored_pairs` and `scored_frame` make it from comparisons and their scores; the other functions read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from vlmrm.conversation import Comparison, Messages, media_of, text_of
from vlmrm.data.media import image_size, local_path
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.measures.donors import cluster_of
from vlmrm.measures.intervals import Mean, numbered
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.statistics import BestOfN, ReliabilityBin, best_of_n, markup, reliability
from vlmrm.outputs import ONE, Outputs

SIDES = ("chosen", "rejected")
COLUMNS = (
    *("comparison_id", "pair", "cluster", "tie", "weight"),
    *(f"{side}_{name}" for side in SIDES for name in ("branch", "rating", "score")),
)
TEXT = 2000  # characters kept of a text, for the report
LIST = 3  # candidates from which on a comparison is a ranked list


@dataclass
class ScoredComparisons:
    """Comparisons with the score of each branch; `dropped` are the rows that could not be scored.

    `altered`, `failed`, `verdicts`, `outputs` and `altered_outputs` are by comparison what `ScoredRow` has.
    """

    comparisons: Sequence[Comparison] = ()
    scores: list[list[float]] = field(default_factory=list)
    altered: list[dict[str, list[float]]] = field(default_factory=list)
    dropped: list[RowError] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    verdicts: list[Mapping[tuple[int, int], tuple[float, float]]] = field(default_factory=list)
    outputs: list[Mapping[str, Sequence[float]]] = field(default_factory=list)
    altered_outputs: list[Mapping[str, Mapping[str, Sequence[float]]]] = field(default_factory=list)


class Candidates(NamedTuple):
    """Every branch of every comparison once: scores[B], ratings[B], and groups[B], the number of its comparison."""

    scores: np.ndarray
    ratings: np.ndarray
    groups: np.ndarray


def scored_pairs(
    comparisons: Sequence[Comparison], scores: Sequence[Sequence[float]], outputs: Outputs = ONE
) -> pd.DataFrame:
    """Return one row for each pair of each comparison, in order; `scores[i]` has one score a branch.

    Of several `outputs` the pairs are those of judgements by which the total can be measured.

    Columns: comparison_id, pair, cluster (see `cluster_of`: the unit of intervals), category, tie, weight; chosen_ and
    rejected_ branch, rating, score.
    """
    rows: list[dict[str, Any]] = []
    for comparison, branch_scores in zip(comparisons, scores, strict=True):
        for row in _pairs_of(comparison, outputs=outputs):
            rows.append(row | {f"{side}_score": branch_scores[row[f"{side}_branch"]] for side in SIDES})
    return pd.DataFrame(rows, columns=pd.Index(["category", *COLUMNS]))


@dataclass(frozen=True)
class PairTable:
    """The pairs of comparisons before they are scored, with the numbers [N] of their branches among all."""

    frame: pd.DataFrame
    chosen: np.ndarray
    rejected: np.ndarray


def pair_table(
    comparisons: Iterable[Comparison],
    group_by: Sequence[str] = (),
    cluster_by: str | None = None,
    outputs: Outputs = ONE,
) -> PairTable:
    """Return the pairs of comparisons, which all models that score them share."""
    absent = set(group_by)
    rows: list[dict[str, Any]] = []
    branches: list[tuple[int, int]] = []
    count = 0
    for comparison in comparisons:
        absent -= set(comparison.columns)
        shared = _of_comparison(comparison, group_by)
        answers = list(map(_of_answer, comparison.answers))
        for row in _pairs_of(comparison, cluster_by, outputs):
            for side in SIDES:
                row |= {f"{side}_{name}": value for name, value in answers[row[f"{side}_branch"]].items()}
            rows.append({**shared, **row})
            branches.append((count + row["chosen_branch"], count + row["rejected_branch"]))
        count += len(answers)
    _refuse_unknown([name for name in group_by if name in absent])
    frame = pd.DataFrame(rows, columns=None if rows else pd.Index([*COLUMNS, "prompt_text"]))
    if "margin_label" in frame:
        frame["margin_label"] = frame["margin_label"].astype("float64")
    chosen, rejected = np.array(branches, dtype=np.int64).reshape(-1, 2).T
    return PairTable(frame, chosen, rejected)


def scored_frame(
    result: ScoredComparisons,
    *,
    model: str = "",
    checkpoint: str = "",
    step: int | None = None,
    group_by: Sequence[str] = (),
    table: PairTable | None = None,
) -> pd.DataFrame:
    """Return `scored_pairs` with the further columns that interventions and the report need.

    Further columns: model, checkpoint, step; by/NAME for each of `group_by`; chosen_ and rejected_ length
    (characters), markup (pieces of markdown), pixels, text, image_paths; margin_label; prompt_text,
    image_paths of the prompt; and for each intervention that was scored its _chosen
    and _rejected score, NaN where it does not apply. By default the `pair_table` of the comparisons is made.
    """
    table = pair_table(result.comparisons, group_by) if table is None else table
    named = {"model": model, "checkpoint": checkpoint, "step": np.nan if step is None else float(step)}
    scores = {"": np.array([*chain.from_iterable(result.scores)], dtype=np.float64)}
    for name in INTERVENTIONS:
        if any(name in altered for altered in result.altered):
            of_rows = zip(result.scores, result.altered, strict=True)
            values = (altered.get(name, [np.nan] * len(plain)) for plain, altered in of_rows)
            scores[f"{name}_"] = np.array([*chain.from_iterable(values)], dtype=np.float64)
    columns = {}
    for name, values in scores.items():
        suffix = "" if name else "_score"
        columns |= {f"{name}chosen{suffix}": values[table.chosen], f"{name}rejected{suffix}": values[table.rejected]}
    head = pd.DataFrame(named, index=table.frame.index)
    return pd.concat([head, table.frame, pd.DataFrame(columns, index=table.frame.index)], axis=1)


def check_columns(comparisons: Iterable[Comparison], group_by: Sequence[str]) -> None:
    """Refuse a column that no row has."""
    absent = list(group_by)
    for comparison in comparisons:
        absent = [name for name in absent if name not in comparison.columns]
        if not absent:
            return
    _refuse_unknown(absent)


def _refuse_unknown(absent: Sequence[str]) -> None:
    if absent:
        raise ConfigError(
            f"group_by or cluster_by names {absent[0]}, which no row of the evaluation data has as a further column "
            "(category has figures anyway): check its name."
        )


def _pairs_of(
    comparison: Comparison, cluster_by: str | None = None, outputs: Outputs = ONE
) -> Iterator[dict[str, Any]]:
    counted = outputs.counted(comparison)
    if counted is None:
        return
    comparison = counted
    shared = {
        "comparison_id": comparison.id,
        "cluster": cluster_of(comparison, cluster_by),
        "category": comparison.category,
        "weight": comparison.judgement.weight,
    }
    ratings = comparison.ratings
    for number, (chosen, rejected, tie) in enumerate(comparison.agreed()):
        row = {**shared, "pair": number, "tie": tie}
        for side, i in zip(SIDES, (chosen, rejected), strict=True):
            row |= {f"{side}_branch": i, f"{side}_rating": ratings[i]}
        yield row


def _of_comparison(comparison: Comparison, group_by: Sequence[str]) -> dict[str, Any]:
    images = _single(comparison.prompt)
    return {
        **{f"by/{name}": comparison.columns.get(name) for name in group_by},
        "margin_label": comparison.judgement.margin,
        "prompt_text": text_of(comparison.prompt)[:TEXT],
        "image_paths": _local_paths(images),
    }


def _of_answer(answer: Messages) -> dict[str, Any]:
    images = _single(answer)
    text = text_of(answer)
    return {
        "length": len(text),
        "markup": markup(text),
        "pixels": sum(map(_pixels, images)),
        "text": text[:TEXT],
        "image_paths": _local_paths(images),
    }


def _single(messages: Messages) -> list[Any]:
    """Return the references that are one file or picture, not the frames of a video."""
    return [medium.reference for medium in media_of(messages) if not isinstance(medium.reference, tuple)]


def _local_paths(references: Sequence[Any]) -> list[str]:
    paths = [local_path(reference) for reference in references if isinstance(reference, str)]
    return [path for path in paths if not path.startswith("data:")]


def _pixels(reference: Any) -> int:
    return _cached_area(reference) if isinstance(reference, str) and Path(reference).exists() else _area(reference)


def _area(reference: Any) -> int:
    try:
        width, height = image_size(reference)
    except RowError:  # a video
        return 0
    return width * height


_cached_area = cache(_area)


def read_pairs(file: Path) -> pd.DataFrame:
    """Return the scored pairs of a sweep."""
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as scored pairs ({error}): delete it and evaluate again.") from error


def check_pairs(frame: pd.DataFrame) -> None:
    """Refuse scored pairs from which no metric can be computed."""
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise DataError(f"the scored pairs have no column {missing[0]}: evaluate the checkpoint again")
    if frame.empty:
        raise DataError("there are no scored pairs: check the evaluation data")
    names = [name for name in ("model", "checkpoint") if name in frame]
    if names and (count := len(frame[names].drop_duplicates())) > 1:
        raise DataError(f"the scored pairs are of {count} checkpoints: take the rows of one")
    bad = not_finite(frame)
    if bad.any():
        first = frame["comparison_id"].to_numpy()[bad][0]
        raise DataError(
            f"{bad.sum()} scored pairs have a score that is no finite number, the first in comparison {first}: "
            "the checkpoint is broken or its dtype too narrow"
        )


def not_finite(frame: pd.DataFrame) -> np.ndarray:
    """Return whether a score of the pair is no finite number: [N]."""
    return ~np.isfinite(frame[["chosen_score", "rejected_score"]].to_numpy(dtype=np.float64)).all(axis=1)


def margins_of(frame: pd.DataFrame) -> np.ndarray:
    """Return the score of the chosen minus that of the rejected, NaN where people tied: [N]."""
    margins = frame["chosen_score"].to_numpy(np.float64) - frame["rejected_score"].to_numpy(np.float64)
    return np.where(frame["tie"].to_numpy(bool), np.nan, margins)


def credits_of(margins: np.ndarray) -> np.ndarray:
    """Return 1 for a margin above zero, a half for one at zero, NaN for NaN: their mean is the accuracy: [N]."""
    return np.where(np.isnan(margins), np.nan, (margins > 0) + 0.5 * (margins == 0))


def pair_index(frame: pd.DataFrame) -> pd.MultiIndex:
    """Return a key for each row, the same in the frames of other checkpoints on the same data.

    A comparison that the data repeat has a key for each repetition.
    """
    keys = frame[["comparison_id", "cluster", "pair", "chosen_branch"]]
    repetition = keys.groupby(list(keys), sort=False).cumcount().rename("repetition")
    return pd.MultiIndex.from_frame(pd.concat([keys, repetition], axis=1))


def comparison_numbers(frame: pd.DataFrame) -> np.ndarray:
    """Return the number of each row's comparison, in order of appearance: [N]."""
    return pd.factorize(pair_index(frame).droplevel(["pair", "chosen_branch"]))[0]


def candidates_of(frame: pd.DataFrame) -> Candidates:
    """Return the branches behind the pairs of `frame`."""
    numbers = comparison_numbers(frame)
    names = ("branch", "score", "rating")
    columns = [{name: frame[f"{side}_{name}"].to_numpy() for name in names} for side in SIDES]
    sides = [pd.DataFrame({"group": numbers, **of_side}) for of_side in columns]
    table = pd.concat(sides).drop_duplicates(["group", "branch"])
    columns = (table[name].to_numpy(np.float64) for name in ("score", "rating"))
    return Candidates(*columns, table["group"].to_numpy())


class PairArrays:
    """The columns of scored pairs that metrics read, as arrays over the N rows of `frame` (see `scored_frame`)."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame

    @cached_property
    def margins(self) -> np.ndarray:
        """Return the score of the chosen minus that of the rejected, NaN where people tied: [N]."""
        return margins_of(self.frame)

    @cached_property
    def decided(self) -> np.ndarray:
        """Return the margins of the pairs that people did not tie."""
        return self.margins[~np.isnan(self.margins)]

    @cached_property
    def credits(self) -> np.ndarray:
        """Return 1 for a margin above zero, half for equal scores, else 0; NaN where people tied: [N]."""
        return credits_of(self.margins)

    @cached_property
    def groups_right(self) -> np.ndarray:
        """Return whether all pairs of a comparison are right, at its first decided pair; NaN elsewhere: [N]."""
        decided = np.flatnonzero(~np.isnan(self.margins))
        numbers = comparison_numbers(self.frame)[decided]
        _, first = np.unique(numbers, return_index=True)
        right = np.full(len(self.frame), np.nan)
        right[decided[first]] = groupwise_right(self.margins[decided], numbers)
        return right

    @cached_property
    def candidates(self) -> Candidates:
        return candidates_of(self.frame)

    @cached_property
    def reliability(self) -> list[ReliabilityBin]:
        return reliability(self.decided)

    @cached_property
    def clusters(self) -> np.ndarray:
        """Return the number of each row's cluster: [N]."""
        return numbered(self.frame["cluster"].to_numpy())

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Return the first row of each comparison, in the order of the candidates' groups."""
        return np.unique(comparison_numbers(self.frame), return_index=True)[1]

    def of_lists(self, values: np.ndarray) -> Mean:
        """Return the mean of a value for each comparison, NaN for some, at its first row."""
        at_rows = np.full(len(self.frame), np.nan)
        at_rows[self.first_rows] = values
        return Mean(at_rows)

    @cached_property
    def best_of_n(self) -> list[BestOfN]:
        """Return the curve over the comparisons of `LIST` candidates and more."""
        curves = best_of_n(*self.candidates)
        curves[np.bincount(self.candidates.groups, minlength=1)[: len(curves)] < LIST] = np.nan
        rows = []
        for n in range(1, curves.shape[2] + 1):
            long_enough = int((~np.isnan(curves[:, 0, n - 1])).sum())
            if long_enough:
                kinds = (self.of_lists(curves[:, kind, n - 1]).estimate(self.clusters) for kind in range(3))
                rows.append(BestOfN(n, long_enough, *kinds))
        return rows

    @cached_property
    def longer(self) -> np.ndarray:
        """Return by how many characters the chosen answer is longer, NaN where neither has a text: [N]."""
        lengths = self.sides("length")
        longer = np.where(lengths.max(axis=1) > 0, lengths[:, 0] - lengths[:, 1], np.nan)
        longer[np.isnan(self.margins)] = np.nan
        return longer

    @cached_property
    def style(self) -> np.ndarray:
        """Return how much longer the chosen answer is, and how much more markup it has, each of both answers' sum."""
        lengths, marks = self.sides("length"), np.nan_to_num(self.sides("markup"))
        longer = np.where(lengths.sum(axis=1) > 0, self.longer / np.maximum(lengths.sum(axis=1), 1), np.nan)
        return np.stack([longer, (marks[:, 0] - marks[:, 1]) / (marks.sum(axis=1) + 1)], axis=1)

    @cached_property
    def scores(self) -> np.ndarray:
        """Return both scores, NaN where people tied: [N, 2]."""
        return np.where(np.isnan(self.margins)[:, None], np.nan, self.sides("score"))

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers [N]; an absent one is all NaN, as where a row has no value."""
        return self.frame[name].to_numpy(np.float64) if name in self.frame else np.full(len(self.frame), np.nan)

    def sides(self, name: str) -> np.ndarray:
        """Return a column of the chosen and that of the rejected: [N, 2]."""
        return np.stack([self.column(f"chosen_{name}"), self.column(f"rejected_{name}")], axis=1)

    @cached_property
    def positions(self) -> np.ndarray:
        """Return what a judge gave the chosen answer where it was shown first, and second; NaN for ties: [N, 2]."""
        positions = np.stack([self.column("credit_first"), self.column("credit_second")], axis=1)
        return np.where(np.isnan(self.margins)[:, None], np.nan, positions)

    def altered_margins(self, name: str) -> np.ndarray:
        """Return the margins under an intervention, NaN where people tied or it was not scored: [N].

        Of an attack it is the margin of the chosen answer as it is over the rejected one changed.
        """
        chosen, rejected = (self.column(f"{name}_{side}") for side in ("chosen", "rejected"))
        bad = (np.isnan(chosen) != np.isnan(rejected)) | np.isinf(chosen) | np.isinf(rejected)
        if bad.any():
            first = self.frame["comparison_id"].to_numpy()[bad][0]
            raise DataError(
                f"{bad.sum()} scored pairs have a {name} score that is no finite number, the first in comparison "
                f"{first}: the checkpoint is broken or its dtype too narrow"
            )
        if name in INTERVENTIONS and INTERVENTIONS[name].attack:
            chosen = np.where(np.isnan(rejected), np.nan, self.column("chosen_score"))
        return np.where(self.frame["tie"].to_numpy(bool), np.nan, chosen - rejected)


def groupwise_right(margins: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return for each group, in ascending order of groups[N], whether all its margins are above zero."""
    _, codes = np.unique(groups, return_inverse=True)
    return np.bincount(codes, weights=margins <= 0) == 0
