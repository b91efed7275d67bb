"""Differences between checkpoints on the same pairs, tested all together.

If all checkpoints are equally good, it is chance which of them has which verdicts on a cluster: exchanging them in
whole clusters shows what differences chance makes. A difference and those of chance are divided alike, each by the
root of its squares over clusters, so that the tests hold however unequal their numbers of pairs are. The largest of
all differences in each exchange is what each one is held against (Westfall and Young, Resampling-Based Multiple
Testing, 1993): with a probability of 95 % none at all is called real by mistake, and all intervals hold together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from vlmrm.errors import DataError
from vlmrm.measures.intervals import LEVEL, Estimate, numbered
from vlmrm.measures.pairs import check_pairs, credits_of, margins_of, pair_index

DRAWS, SEED = 1000, 0
CELLS = 1 << 18  # draws x clusters x checkpoints held at a time
POWER = 0.8
TINY = 1e-9  # of a statistic's rounding


class PairedTest(NamedTuple):
    """A test of two checkpoints on the same pairs; equal scores are half right.

    `difference` is the accuracy of `first` minus that of `second`. Its interval holds together with those of all
    tests made with it, and `p_value` is adjusted for them: it is below 0.05 where the interval is without zero.
    `detectable` is the difference that these tests would have found with a probability of 80 %, NaN where none.
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
    detectable: float


def compare(frames: Mapping[str, pd.DataFrame]) -> list[PairedTest]:
    """Test each two of `frames`, scored pairs by checkpoint, on the pairs that all of them have."""
    if len(frames) < 2:
        return []
    names = list(frames)
    right, clusters = right_of_shared_pairs(frames)
    sizes = np.bincount(clusters).astype(np.float64)
    sums = np.stack([np.bincount(clusters, column) for column in right.T], axis=1)
    added = added_square(sizes)
    statistics = statistics_of(sums, added)
    chance = chance_of_largest(sums, added)
    # An element of `chance`: p-values then agree with it.
    quantile = float(np.quantile(chance, LEVEL, method="higher")) if len(chance) else np.nan
    if quantile == 0:  # no two differ in any pair
        quantile = float(stdtrit(len(sizes) - 1, (1 + LEVEL) / 2))
    findable = difference_of(sizes, sizes, quantile, added).low > 0  # if one were right everywhere, the other nowhere
    tests = []
    for i, j in combinations(range(len(names)), 2):
        extreme = int((chance >= abs(statistics[i, j]) - TINY).sum())
        difference = difference_of(sums[:, i] - sums[:, j], sizes, quantile, added)
        error = difference.standard_error
        detectable = (quantile + stdtrit(len(sizes) - 1, POWER)) * error if findable else np.nan
        tests.append(
            PairedTest(
                first=names[i],
                second=names[j],
                pairs=len(right),
                first_accuracy=float(right[:, i].mean()),
                second_accuracy=float(right[:, j].mean()),
                difference=difference,
                only_first=int((right[:, i] > right[:, j]).sum()),
                only_second=int((right[:, j] > right[:, i]).sum()),
                p_value=(1 + extreme) / (1 + len(chance)),
                detectable=float(detectable) if detectable <= 1 else np.nan,
            )
        )
    return tests


def added_square(sizes: np.ndarray) -> float:
    """Return the square of one more gain and one more loss, of a cluster of the size that most pairs have.

    Without them few changes would have an interval of no width (Bonett and Price, 2012).
    """
    return 2 * float((sizes**2).sum() / sizes.sum()) ** 2


def statistics_of(sums: np.ndarray, added: float) -> np.ndarray:
    """Return the differences of M checkpoints by their errors [..., M, M], of right answers by cluster [..., P, M]."""
    products, totals = sums.swapaxes(-1, -2) @ sums, sums.sum(axis=-2)
    own = np.diagonal(products, axis1=-2, axis2=-1)
    squares = own[..., :, None] + own[..., None, :] - 2 * products
    return (totals[..., :, None] - totals[..., None, :]) / np.sqrt(np.maximum(squares, 0) + added)


def chance_of_largest(sums: np.ndarray, added: float) -> np.ndarray:
    """Return the largest of `statistics_of` where checkpoints are exchanged within clusters: [DRAWS].

    Empty for fewer than two clusters.
    """
    count, models = sums.shape
    if count < 2:
        return np.zeros(0)
    sums = sums - sums.mean(axis=1, keepdims=True)
    sums = sums[(sums != 0).any(axis=1)]  # elsewhere an exchange changes nothing
    rng, clusters = np.random.default_rng(SEED), np.arange(len(sums))[:, None]
    largest = []
    for start in range(0, DRAWS, step := max(CELLS // max(sums.size, 1), 1)):
        turns = rng.integers(0, models, (min(step, DRAWS - start), len(sums), 1))
        turned = sums[clusters, (np.arange(models) + turns) % models]
        largest.append(statistics_of(turned, added).max(axis=(1, 2)))
    return np.concatenate(largest)


def difference_of(sums: np.ndarray, sizes: np.ndarray, quantile: float, added: float) -> Estimate:
    """Return a mean difference with those that it would not contradict: their statistic is within ± `quantile`.

    sums [P] are what two checkpoints differ by in each cluster, sizes [P] its pairs.
    """
    pairs, whole, squares = sizes.sum(), sums.sum(), (sums**2).sum() + added
    ends = (np.nan, np.nan)
    # (whole - d pairs)² <= quantile² (Σ (sums - d sizes)² + added), a quadratic in d.
    a = pairs**2 - quantile**2 * (sizes**2).sum()
    b = whole * pairs - quantile**2 * (sums * sizes).sum()
    if a > 0:
        half = np.sqrt(max(b**2 - a * (whole**2 - quantile**2 * squares), 0.0))
        ends = (max((b - half) / a, -1.0), min((b + half) / a, 1.0))
    elif not np.isnan(quantile):  # so few clusters, or one with so many of the pairs, contradict nothing
        ends = (-1.0, 1.0)
    value = whole / pairs
    error = np.sqrt(((sums - value * sizes) ** 2).sum() + added) / pairs if len(sizes) > 1 else np.nan
    return Estimate(float(value), *map(float, ends), float(error), int(pairs), len(sizes))


def right_of_shared_pairs(frames: Mapping[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Return how right each of M checkpoints is on each shared pair, [N, M] of 0, 0.5 and 1, and the clusters [N]."""
    tables = []
    for name, frame in frames.items():
        check_pairs(frame)
        margins = pd.Series(margins_of(frame), index=pair_index(frame), name=name)
        tables.append(margins.dropna())  # people's ties
    shared = reduce(lambda index, table: index.intersection(table.index, sort=False), tables[1:], tables[0].index)
    if not len(shared):
        rows = [{*frame["comparison_id"]} for frame in frames.values()]
        why = (
            "were evaluated with another cluster_by or other prompts"
            if set.intersection(*rows)
            else "are of other data"
        )
        raise DataError(f"{' and '.join(frames)} have no scored pairs in common: they {why}, so evaluate them alike")
    right = np.stack([credits_of(table.loc[shared].to_numpy()) for table in tables], axis=1)
    return right, numbered(shared.get_level_values("cluster").to_numpy())
