"""Intervals of a benchmark's figures, whatever its rule computes of the scored pairs.

A rule is any function of pairs, so its figures are computed again without one part of the units at a time (the
delete-a-group jackknife: Kott, The delete-a-group jackknife, 2001). Units are prompts, whose pairs stay together; they
are dealt out to at most `PARTS` parts in order of category, so that each part has its share of every category.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from scipy.stats import t

from vlmrm.evaluation.public.rules import Groups
from vlmrm.measures.intervals import LEVEL, Estimate, Interval, Spread, share

PARTS = 50
SEED = 0
NAN = float("nan")
TEXTS = ("text", "image_paths")  # columns that no rule reads


def with_intervals(
    rule: Callable[[pd.DataFrame], Mapping[str, float]],
    frame: pd.DataFrame,
    figures: Mapping[str, float],
    units: np.ndarray,
    rows: Mapping[str, np.ndarray],
) -> dict[str, Estimate]:
    """Return the figures of `rule` with 95 % intervals, NaN where the units they rest on are fewer than two.

    An interval is Wilson's of as many independent values as the jackknife's standard error is worth (Korn and
    Graubard, Confidence intervals for proportions, 1998), with Student's t of as many degrees of freedom as there are
    parts but one. A `threshold` is no share and has none.

    Args:
        units: what is independent, units[N].
        rows: by figure, whether it rests on each pair: [N].
    """
    parts = dealt(units, frame["category"].map(str).to_numpy())
    plain = frame[[name for name in frame if not str(name).endswith(TEXTS)]]
    without = [rule(plain[parts != part]) for part in range(parts.max() + 1)] if parts.max() else []
    estimates = {}
    for name, value in figures.items():
        used = rows[name]
        count, held = len(pd.unique(units[used])), len(np.unique(parts[used]))
        error = NAN
        if held > 1 and name != "threshold":
            values = np.array([figures.get(name, NAN) for figures in without])
            error = float(np.sqrt((held - 1) / held * ((values - value) ** 2).sum()))
        low, high = (NAN, NAN) if np.isnan(error) else interval_of(value, error, held - 1, count)
        estimates[name] = Estimate(value, low, high, error, int(used.sum()), count)
    return estimates


def dealt(units: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Return the number of each row's part, below `PARTS`: units in order of category, shuffled within, dealt out.

    In the data's own order, rows that alternate would fall into alternate parts.
    """
    codes = pd.factorize(units)[0]
    first = pd.factorize(pd.Series(categories).groupby(codes).first())[0]
    shuffled = np.random.default_rng(SEED).permutation(len(first))
    order = np.argsort(np.lexsort((shuffled, first)))
    return order[codes] % min(PARTS, len(first))


def interval_of(value: float, error: float, freedom: int, count: int) -> Interval:
    """Return the interval of a share with this standard error; without any, as of `count` values."""
    effective = value * (1 - value) / error**2 if error > 1e-9 and 0 < value < 1 else float(count)
    low, high = share(value, Spread(error, freedom, effective), float(t.ppf((1 + LEVEL) / 2, freedom)))
    return Interval(float(low), float(high))


def rows_of(name: str, frame: pd.DataFrame, groups: Groups) -> np.ndarray:
    """Return whether each pair is of the part that a figure is named after, all where it is named after none: [N]."""
    part = name.partition("/")[0]
    names = frame["category"].map(str)
    among = names.isin([name, *groups.get(name, ())]).to_numpy()
    if among.any():
        return among
    of_part = ((names == part) | names.str.startswith(f"{part}/")).to_numpy()
    return of_part if of_part.any() else np.ones(len(frame), dtype=bool)
