"""Differences between checkpoints on the same pairs, tested all together.

If two checkpoints are equally good, it is chance which of them has the better half of what differs within a prompt:
flipping the signs of whole prompts shows what differences chance makes. The largest of all studentised differences
in each flip is what each one is held against (Westfall and Young, Resampling-Based Multiple Testing, 1993), so that
with a probability of 95 % no difference at all is called real by mistake, and all intervals hold together.
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
from vlmrm.measures.intervals import LEVEL, Estimate, Mean, numbered, spread, with_both_signs
from vlmrm.measures.pairs import check_pairs, margins_of, pair_index

FLIPS, SEED = 2000, 0
CELLS = 1 << 22  # flips x prompts held at a time
POWER = 0.8


class PairedTest(NamedTuple):
    """A test of two checkpoints on the same pairs; equal scores are wrong.

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
    right, prompts = right_of_shared_pairs(frames)
    couples = list(combinations(range(len(frames)), 2))
    names = list(frames)
    influences = [Mean(right[:, i] - right[:, j]).influence() for i, j in couples]
    spreads = [spread(influence, prompts) for influence in influences]
    chance = chance_of_largest(np.stack([right[:, i] - right[:, j] for i, j in couples], axis=1), prompts)
    # An element of `chance`: p-values then agree with it, and those that are infinite are not interpolated.
    quantile = float(np.quantile(chance, LEVEL, method="higher")) if len(chance) else np.nan
    if quantile == 0:  # no two differ in any pair
        quantile = float(stdtrit(spreads[0][0].freedom, (1 + LEVEL) / 2))
    tests = []
    for (i, j), influence, (of, count) in zip(couples, influences, spreads, strict=True):
        centre, error = with_both_signs(influence.value, of)
        ends = np.clip([centre - quantile * error, centre + quantile * error], -1, 1)
        detectable = (quantile + stdtrit(of.freedom, POWER)) * error if of.freedom else np.nan
        extreme = int((chance >= abs(centre) / error).sum()) if len(chance) else 0
        tests.append(
            PairedTest(
                first=names[i],
                second=names[j],
                pairs=len(right),
                first_accuracy=float(right[:, i].mean()),
                second_accuracy=float(right[:, j].mean()),
                difference=Estimate(influence.value, *map(float, ends), of.error, len(right), count),
                only_first=int((right[:, i] > right[:, j]).sum()),
                only_second=int((right[:, j] > right[:, i]).sum()),
                p_value=(1 + extreme) / (1 + len(chance)),
                detectable=float(detectable) if detectable <= 1 else np.nan,
            )
        )
    return tests


def chance_of_largest(differences: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Return the largest studentised mean of differences [N, K] in each flip of the signs of prompts: [FLIPS].

    Empty for fewer than two prompts. A difference that is zero in every pair is never the largest.
    """
    sums = np.stack([np.bincount(prompts, column) for column in differences.T], axis=1)
    count = len(sums)
    if count < 2:
        return np.zeros(0)
    norms = np.sqrt((sums**2).sum(axis=0))
    scaled = np.divide(sums, norms, out=np.zeros_like(sums), where=norms > 0).astype(np.float32)
    rng, largest = np.random.default_rng(SEED), []
    for start in range(0, FLIPS, step := max(CELLS // count, 1)):
        bits = rng.integers(0, 2, (min(step, FLIPS - start), count), dtype=np.int8)
        largest.append(np.abs((2 * bits - 1).astype(np.float32) @ scaled).max(axis=1))
    most = np.minimum(np.concatenate(largest).astype(np.float64) ** 2, count)  # of the sum over its root mean square
    with np.errstate(divide="ignore"):
        return np.sqrt(most * (count - 1) / (count - most))


def right_of_shared_pairs(frames: Mapping[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each of M checkpoints has each shared pair right, [N, M] of 0 and 1, and the prompts [N]."""
    tables = []
    for name, frame in frames.items():
        check_pairs(frame)
        margins = pd.Series(margins_of(frame), index=pair_index(frame), name=name)
        tables.append(margins.dropna())  # people's ties
    shared = reduce(lambda index, table: index.intersection(table.index, sort=False), tables[1:], tables[0].index)
    if not len(shared):
        raise DataError(f"{' and '.join(frames)} have no scored pairs in common: compare results of the same data")
    right = np.stack([table.loc[shared].to_numpy() > 0 for table in tables], axis=1).astype(np.float64)
    return right, numbered(shared.get_level_values("prompt_id").to_numpy())
