"""Figures with 95 % intervals that hold for a few clusters, of which each may have many pairs.

Pairs of one cluster are correlated, so clusters are the units. Each figure says by how much each row moves it, its
influence; the influences of a cluster's rows are added up, and from them follow the standard error of the jackknife
that leaves out one cluster at a time, and an interval with Student's t of as many degrees of freedom as there are
clusters of equal weight, but one (Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference, 2015).
Figures that cannot leave a range have an interval that cannot either: see `SCALES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit
from scipy.stats import rankdata

LEVEL = 0.95
NAN = float("nan")

Scale = Literal["plain", "share", "difference", "positive", "correlation"]


class Estimate(NamedTuple):
    """A figure with the ends of its 95 % interval and its standard error, all NaN where they cannot be estimated."""

    value: float
    low: float
    high: float
    standard_error: float
    n: int  # the number of its values
    clusters: int  # the number of their clusters

    def in_percent(self, sign: str = "") -> str:
        """Return it in percent with its interval: 79.1 (75.0-82.6)."""
        ends = "" if np.isnan(self.low) else f" ({100 * self.low:.1f}-{100 * self.high:.1f})"
        return f"{100 * self.value:.1f}{sign}{ends}"


class Interval(NamedTuple):
    """The ends of a 95 % interval."""

    low: float
    high: float


class Influence(NamedTuple):
    """A figure, how much each row moves it, rows[N], which add up to zero, and each row's share[N] of its weight."""

    value: float
    rows: np.ndarray
    shares: np.ndarray
    n: int


@dataclass(frozen=True)
class Figure:
    """A figure of N rows, with the scale on which its interval is made."""

    scale: Scale = field(default="plain", init=False)

    def influence(self) -> Influence:
        """Return its value and the influence of each row."""
        raise NotImplementedError

    def estimate(self, clusters: np.ndarray) -> Estimate:
        """Return the figure with its interval; clusters[N] numbers the cluster of each row from 0 on."""
        influence = self.influence()
        return with_ends(influence, *spread(influence, clusters), self.scale)


@dataclass(frozen=True)
class Mean(Figure):
    """The mean of values[N], weighted by weights[N]; rows where either is NaN do not count.

    Its scale is "share" for values from 0 to 1, "difference" for those from -1 to 1, "positive" for those above 0.
    """

    values: np.ndarray
    weights: np.ndarray | None = None
    scale: Scale = field(default="plain", kw_only=True)

    def influence(self) -> Influence:
        weights = np.ones(len(self.values)) if self.weights is None else np.asarray(self.weights, dtype=np.float64)
        product = weights * self.values
        counts = ~np.isnan(product)
        weights = np.where(counts, weights, 0.0)
        total = weights.sum()
        if not total > 0:
            return Influence(NAN, np.zeros(len(weights)), np.zeros(len(weights)), int(counts.sum()))
        shares = weights / total
        value = float(np.where(counts, product, 0.0).sum() / total)
        return Influence(value, shares * (np.where(counts, self.values, value) - value), shares, int(counts.sum()))


@dataclass(frozen=True)
class Correlation(Figure):
    """Spearman's rank correlation of x and y, [N] or, with B values a row, [N, B]; a NaN does not count."""

    x: np.ndarray
    y: np.ndarray
    scale = "correlation"

    def influence(self) -> Influence:
        """Return it; a row moves it by its own ranks, and by what it adds to the ranks of the others."""
        x, y = (np.reshape(values, (len(values), -1)).astype(np.float64) for values in (self.x, self.y))
        counts = ~np.isnan(x) & ~np.isnan(y)
        n = int(counts.sum())
        rows, shares = np.zeros(counts.shape), counts / max(n, 1)
        a, b = _centred_ranks(x[counts]), _centred_ranks(y[counts])
        aa, bb, ab = (float(np.mean(product)) if n else 0.0 for product in (a * a, b * b, a * b))
        if not (aa > 0 and bb > 0):
            return Influence(NAN, rows.sum(axis=1), shares.sum(axis=1), n)
        value = ab / np.sqrt(aa * bb)
        by_x, by_y = _Order(x[counts]), _Order(y[counts])
        moved = (a * b + by_x.above_less_below(b) + by_y.above_less_below(a) - 3 * ab) / np.sqrt(aa * bb)
        for centred, order, spread in ((a, by_x, aa), (b, by_y, bb)):
            moved -= value * (centred**2 + 2 * order.above_less_below(centred) - 3 * spread) / (2 * spread)
        rows[counts] = moved / n
        return Influence(float(value), rows.sum(axis=1), shares.sum(axis=1), n)


@dataclass(frozen=True)
class Lost(Figure):
    """By how much a figure of N rows is above another of the same rows; equal values, without ranks, keep nothing."""

    before: Figure
    after: Figure

    def influence(self) -> Influence:
        a, b = self.before.influence(), self.after.influence()
        b = b._replace(value=0.0) if np.isnan(b.value) else b
        return Influence(a.value - b.value, a.rows - b.rows, a.shares, a.n)


class Spread(NamedTuple):
    """What an interval is made of: standard error, degrees of freedom, and how many independent values it is worth."""

    error: float
    freedom: float
    effective: float


def spread(influence: Influence, clusters: np.ndarray) -> tuple[Spread, int]:
    """Return the spread of a figure, NaN for fewer than two clusters, and the number of its clusters."""
    rows, shares = (np.bincount(clusters, part) for part in (influence.rows, influence.shares))
    counted = shares > 0
    rows, shares = rows[counted], shares[counted]
    count = len(rows)
    if count < 2 or not (np.isfinite(influence.value) and np.isfinite(rows).all()):
        return Spread(NAN, 0, NAN), count
    left_out = rows / (1 - shares)  # what the figure changes by without the cluster
    error = float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))
    alone = float((influence.rows**2).sum())  # the variance if all rows were independent
    if alone and error > 1e-12:
        # Rows of unequal weight are worth fewer of equal weight (Kish, Survey Sampling, 1965).
        effective = min(alone / error**2, 1.0) / float((influence.shares**2).sum())
    else:
        effective = 1 / float((shares**2).sum())
    # Where a few clusters have most of the weight, the error is as uncertain as that of so few.
    return Spread(error, max(1 / float((shares**2).sum()) - 1, 1.0), max(effective, 1.0)), count


def with_ends(influence: Influence, of: Spread, count: int, scale: Scale) -> Estimate:
    """Return a figure of some spread and count of clusters with its interval."""
    if np.isnan(of.error):
        return Estimate(influence.value, NAN, NAN, NAN, influence.n, count)
    low, high = SCALES[scale](influence.value, of, float(stdtrit(of.freedom, (1 + LEVEL) / 2)))
    return Estimate(influence.value, float(low), float(high), of.error, influence.n, count)


def plain(value: float, of: Spread, quantile: float) -> Interval:
    """Return value ± quantile standard errors."""
    return Interval(value - quantile * of.error, value + quantile * of.error)


def share(value: float, of: Spread, quantile: float) -> Interval:
    """Return Wilson's interval of as many independent values as the clusters are worth (Korn and Graubard, 1998)."""
    square = quantile**2 / of.effective
    centre = (value + square / 2) / (1 + square)
    half = np.sqrt(square) * np.sqrt(max(value * (1 - value), 0) + square / 4) / (1 + square)
    return Interval(max(centre - half, 0.0), min(centre + half, 1.0))


def difference(value: float, of: Spread, quantile: float) -> Interval:
    """Return the interval with one more loss and one more gain (Bonett and Price, 2012), which few changes need."""
    centre, error = with_both_signs(value, of)
    return Interval(max(centre - quantile * error, -1.0), min(centre + quantile * error, 1.0))


def with_both_signs(value: float, of: Spread) -> tuple[float, float]:
    """Return a mean of differences and its standard error after a value of 1 and one of -1 are added."""
    kept = of.effective / (of.effective + 2)
    added = (2 * (1 + kept * value**2)) / (of.effective + 2) ** 2
    return kept * value, float(np.sqrt((kept * of.error) ** 2 + added))


def positive(value: float, of: Spread, quantile: float) -> Interval:
    """Return the interval on the scale of logarithms; of zero the plain one."""
    if not value > 0:
        return plain(value, of, quantile)
    with np.errstate(over="ignore"):  # of an error that leaves everything open
        factor = np.exp(quantile * of.error / value)
    return Interval(value / factor, value * factor)


def correlation(value: float, of: Spread, quantile: float) -> Interval:
    """Return the interval on Fisher's scale; of ±1 that of the differences, since Fisher's has no end."""
    if 1 - value**2 < 1e-12:
        return difference(value, of, quantile)
    centre, half = np.arctanh(value), quantile * of.error / (1 - value**2)
    return Interval(np.tanh(centre - half), np.tanh(centre + half))


SCALES: dict[Scale, Callable[[float, Spread, float], Interval]] = {
    "plain": plain,
    "share": share,
    "difference": difference,
    "positive": positive,
    "correlation": correlation,
}


def numbered(clusters: Sequence | np.ndarray) -> np.ndarray:
    """Return the number of each row's cluster, in order of appearance: [N]."""
    return pd.factorize(np.asarray(clusters, dtype=object))[0]


class _Order:
    """The order of values[n]: for each of them sums over those above it and below it, in n log n."""

    def __init__(self, values: np.ndarray):
        self.order = np.argsort(values, kind="stable")
        ascending = values[self.order]
        self.below = np.searchsorted(ascending, values, "left")  # how many are below each
        self.up_to = np.searchsorted(ascending, values, "right")

    def above_less_below(self, weights: np.ndarray) -> np.ndarray:
        """Return for each value half the mean weight of those above it, less that of those below: [n]."""
        sums = np.concatenate([[0.0], np.cumsum(weights[self.order])])
        return (sums[-1] - sums[self.up_to] - sums[self.below]) / (2 * len(weights))


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """Return mid-ranks around zero, between -0.5 and 0.5."""
    return (rankdata(values) - 0.5) / max(len(values), 1) - 0.5
