"""The columns of scored pairs that metrics read, as arrays."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pandas as pd

from vlmrm.errors import DataError
from vlmrm.measures.intervals import AtRows, Figure, Mean, numbered
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.pairs import Candidates, candidates_of, comparison_numbers, credits_of, margins_of
from vlmrm.measures.statistics import BestOfN, ReliabilityBin, best_of_n, reliability

LIST = 3  # candidates from which on a comparison is a ranked list


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
    def right(self) -> np.ndarray:
        """Return 1 for a margin above zero, else 0, NaN where people tied: [N]."""
        return np.where(np.isnan(self.margins), np.nan, self.margins > 0)

    @cached_property
    def credits(self) -> np.ndarray:
        """Return `right`, with a half for equal scores: [N]."""
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
    def prompts(self) -> np.ndarray:
        """Return the number of each row's prompt: [N]."""
        return numbered(self.frame["prompt_id"].to_numpy())

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Return the first row of each comparison, in the order of the candidates' groups."""
        return np.unique(comparison_numbers(self.frame), return_index=True)[1]

    def of_lists(self, values: np.ndarray) -> Mean:
        """Return the mean of a value for each comparison, NaN for some, at its first row."""
        at_rows = np.full(len(self.frame), np.nan)
        at_rows[self.first_rows] = values
        return Mean(at_rows)

    def of_candidates(self, figure: Figure) -> AtRows:
        """Return a figure of all candidates, each at the first row of its comparison."""
        return AtRows(figure, self.first_rows[self.candidates.groups], len(self.frame))

    @cached_property
    def best_of_n(self) -> list[BestOfN]:
        """Return the curve over the comparisons of `LIST` candidates and more."""
        curves = best_of_n(*self.candidates)
        curves[np.bincount(self.candidates.groups, minlength=1)[: len(curves)] < LIST] = np.nan
        rows = []
        for n in range(1, curves.shape[2] + 1):
            long_enough = int((~np.isnan(curves[:, 0, n - 1])).sum())
            if long_enough:
                kinds = (self.of_lists(curves[:, kind, n - 1]).estimate(self.prompts) for kind in range(3))
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
