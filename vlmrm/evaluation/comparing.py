"""Whether one checkpoint is better than another: paired tests on the pairs that both scored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import binomtest, false_discovery_control

from vlmrm.errors import DataError
from vlmrm.evaluation.intervals import DRAWS, Estimate, estimate, resample, sums_by_cluster
from vlmrm.evaluation.pairs import check_pairs, margins_of, pair_index


class PairedTest(NamedTuple):
    """Two checkpoints on the same pairs; equal scores are not right.

    `difference` is the accuracy of `first` minus that of `second`, with an interval that resamples prompts.
    `p_value` is McNemar's, exact: how likely so uneven a split of the pairs that only one of them has right is by
    chance. It takes pairs as independent; where prompts have several, trust the interval. `adjusted_p_value` holds
    down the share of false discoveries among all the tests made together (Benjamini and Hochberg).
    """

    first: str
    second: str
    pairs: int
    first_accuracy: float
    second_accuracy: float
    difference: Estimate
    only_first: int
    only_second: int
    p_value: float
    adjusted_p_value: float


def compare(frames: Mapping[str, pd.DataFrame]) -> list[PairedTest]:
    """Every two of `frames`, scored pairs by the name of their checkpoint, on the pairs that all of them have.

    Raises:
        DataError: when they have no pair in common that people did not tie, or a frame cannot be used.
    """
    if len(frames) < 2:
        return []
    right, prompts = _right_of_shared_pairs(frames)
    count = len(right)
    sums = sums_by_cluster(np.concatenate([right, np.ones((count, 1))], axis=1), prompts)
    drawn = resample(sums)
    samples = drawn[:, :-1] / drawn[:, -1:] if len(sums) > 1 else np.full((DRAWS, len(frames)), np.nan)
    accuracies = right.mean(axis=0)
    tests = []
    for (i, first), (j, second) in combinations(enumerate(frames), 2):
        only_first, only_second = int((right[:, i] > right[:, j]).sum()), int((right[:, j] > right[:, i]).sum())
        tests.append(
            PairedTest(
                first=first,
                second=second,
                pairs=count,
                first_accuracy=float(accuracies[i]),
                second_accuracy=float(accuracies[j]),
                difference=estimate(
                    float(accuracies[i] - accuracies[j]), samples[:, i] - samples[:, j], count, len(sums)
                ),
                only_first=only_first,
                only_second=only_second,
                p_value=mcnemar(only_first, only_second),
                adjusted_p_value=float("nan"),
            )
        )
    adjusted = false_discovery_control([test.p_value for test in tests])
    return [test._replace(adjusted_p_value=float(p)) for test, p in zip(tests, adjusted, strict=True)]


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of a split of the pairs that one of two has right; 1 where there are none."""
    return float(binomtest(only_first, only_first + only_second).pvalue) if only_first + only_second else 1.0


def _right_of_shared_pairs(frames: Mapping[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each of M checkpoints has each shared pair right, [N, M] of 0 and 1, and the prompts [N]."""
    tables = []
    for name, frame in frames.items():
        check_pairs(frame)
        margins = pd.Series(margins_of(frame), index=pair_index(frame), name=name)
        tables.append(margins.dropna())  # people's ties
    shared = reduce(lambda index, table: index.intersection(table.index, sort=False), tables[1:], tables[0].index)
    if not len(shared):
        raise DataError(f"{' and '.join(frames)} have no scored pairs in common: compare results of the same data")
    right = np.stack([table.loc[shared].to_numpy() > 0 for table in tables], axis=1).astype(np.float64)
    return right, shared.get_level_values("prompt_id").to_numpy()
