"""Statistics of scores: calibration of margins, style, rank correlations with ratings, best of N.

A margin is calibrated if σ(margin) is the probability that people prefer the chosen answer. The chosen answer is
preferred in every pair, so its probabilities alone only meet events that happened. Each pair therefore counts in both
directions: as σ(margin) for an event that happened, and as σ(-margin) for one that did not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import comb, expit, log_expit
from scipy.stats import rankdata

from vlmrm.measures.bradley_terry import fit, logistic
from vlmrm.measures.intervals import LEVEL, NAN, Estimate, Figure, Influence

BINS = 10
DRAWS, SEED = 1000, 0  # of the interval of the calibration error
# Headings, items of lists, code blocks and rules at the start of a line; bold text and inline code anywhere.
MARKUP = re.compile(r"^\s*(?:#{1,6}\s|[-*+]\s|\d+[.)]\s|```|---)|\*\*[^*\n]+\*\*|`[^`\n]+`", re.MULTILINE)
PRIOR = 0.5  # weight of each slope; the fit begins with half a pair of equal style that is right, and half a wrong one


class ReliabilityBin(NamedTuple):
    """Pairs, in both directions, whose probability lies from `low` to `high`; NaN means in an empty bin."""

    low: float
    high: float
    count: int
    probability: float
    frequency: float


def log_losses(margins: np.ndarray) -> np.ndarray:
    """Return -log σ(margin) of each of margins[N]: the Bradley-Terry loss."""
    return -log_expit(margins)


def squared_errors(margins: np.ndarray) -> np.ndarray:
    """Return (1 - σ(margin))² of each of margins[N], the same in both directions: their mean is the Brier score."""
    return expit(-margins) ** 2


def reliability(margins: np.ndarray) -> list[ReliabilityBin]:
    """Return the frequency of the event in each of `BINS` equally wide bins of its predicted probability."""
    probabilities = np.concatenate([expit(margins), expit(-margins)])
    happened = np.repeat([1.0, 0.0], len(margins))
    edges = np.linspace(0.0, 1.0, BINS + 1)
    codes = _bin_of(probabilities)
    counts = np.bincount(codes, minlength=BINS)
    with np.errstate(invalid="ignore"):
        means = np.bincount(codes, weights=probabilities, minlength=BINS) / counts
        frequencies = np.bincount(codes, weights=happened, minlength=BINS) / counts
    return [
        ReliabilityBin(float(edges[i]), float(edges[i + 1]), int(counts[i]), float(means[i]), float(frequencies[i]))
        for i in range(BINS)
    ]


def fitted_temperature(margins: np.ndarray) -> float:
    """Return the T > 0 that maximises the likelihood of σ(margin / T): above 1, the model is overconfident.

    0 where no margin is below zero (larger scores are always likelier), infinity where the mean margin is not above
    zero (probabilities of one half are likeliest), NaN for no pairs.
    """
    if not len(margins):
        return float("nan")
    if margins.mean() <= 0:
        return float("inf")
    if margins.min() >= 0:
        return 0.0
    scale = float(np.abs(margins).max())
    scaled = margins / scale

    def slope(sharpness: float) -> float:
        """Return the derivative of the likelihood, which is concave in 1 / T."""
        return float(np.mean(scaled * expit(-sharpness * scaled)))

    high = 1.0
    while slope(high) > 0:
        high *= 2
    return scale / root_scalar(slope, bracket=(0.0, high)).root


@dataclass(frozen=True)
class CalibrationError(Figure):
    """The expected calibration error of margins[N]: mean |probability - frequency| of the bins; NaN does not count.

    Chance makes it too large in small samples. The lower end of its interval is therefore the smallest error, of the
    same shape over the bins, under which so large a one is likely with what the spread of the clusters adds.
    """

    margins: np.ndarray

    def _excess(self) -> np.ndarray:
        """Return by how much each row, in both directions, raises probability over frequency: [N, BINS]."""
        counts = ~np.isnan(self.margins)
        margins, rows = self.margins[counts], np.flatnonzero(counts)
        excess = np.zeros((len(counts), BINS))
        for happened, probabilities in ((1.0, expit(margins)), (0.0, expit(-margins))):
            excess[rows, _bin_of(probabilities)] += (probabilities - happened) / (2 * max(len(rows), 1))
        return excess

    def influence(self) -> Influence:
        counts = ~np.isnan(self.margins)
        n = int(counts.sum())
        excess, shares = self._excess(), counts / max(n, 1)
        total = excess.sum(axis=0)
        value = float(np.abs(total).sum()) if n else NAN
        return Influence(value, excess @ np.sign(total) - np.where(counts, value, 0.0) / max(n, 1), shares, n)

    def estimate(self, clusters: np.ndarray) -> Estimate:
        as_measured = super().estimate(clusters)
        if np.isnan(as_measured.low):
            return as_measured
        excess, counts = self._excess(), ~np.isnan(self.margins)
        by_cluster = np.stack([np.bincount(clusters, column) for column in excess.T], axis=1)
        sizes = np.bincount(clusters, counts)
        by_cluster, sizes = by_cluster[sizes > 0], sizes[sizes > 0]
        total = by_cluster.sum(axis=0)
        shares = sizes / sizes.sum()
        left_out = (by_cluster - total * shares[:, None]) / (1 - shares)[:, None]
        values, vectors = np.linalg.eigh(np.cov(left_out.T) * (len(sizes) - 1))
        rng, freedom = np.random.default_rng(SEED), max(1 / (shares**2).sum() - 1, 1.0)
        drawn = rng.normal(size=(DRAWS, BINS)) @ (vectors * np.sqrt(np.maximum(values, 0))).T
        drawn *= np.sqrt(freedom / rng.chisquare(freedom, DRAWS))[:, None]

        def above(scale: float) -> float:
            """Return how often an error of `scale` times the measured one shows as much as was measured."""
            return float(np.mean(np.abs(scale * total + drawn).sum(axis=1) >= as_measured.value))

        return as_measured._replace(low=as_measured.value * _first(above, (1 - LEVEL) / 2))


@dataclass(frozen=True)
class Temperature(Figure):
    """`fitted_temperature` of margins[N]; NaN does not count."""

    margins: np.ndarray
    scale = "positive"

    def influence(self) -> Influence:
        """Return it; its rows are NaN where it is at an end of its range, and has no interval."""
        counts = ~np.isnan(self.margins)
        n, margins = int(counts.sum()), self.margins[counts]
        value = fitted_temperature(margins)
        rows, shares = np.zeros(len(counts)), counts / max(n, 1)
        if not 0 < value < np.inf:
            return Influence(value, np.where(counts, NAN, 0.0), shares, n)
        slopes = margins * expit(-margins / value)
        curvature = float((margins**2 * expit(margins / value) * expit(-margins / value)).sum())
        rows[counts] = -(value**2) * slopes / curvature
        return Influence(value, rows, shares, n)


def _bin_of(probabilities: np.ndarray) -> np.ndarray:
    return np.digitize(probabilities, np.linspace(0.0, 1.0, BINS + 1)[1:-1])


def _first(share: Callable[[float], float], least: float) -> float:
    """Return the smallest scale from 0 on whose share, which grows with it, reaches `least`."""
    low, high = 0.0, 1.0
    if share(low) >= least:
        return low
    while share(high) < least and high < 1e6:
        high *= 2
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) >= least else (middle, high)
    return high


# Style: how much markup a text has, and the accuracy where both answers have the same style -------------------------


def markup(text: str) -> int:
    """Return how many pieces of markdown a text has."""
    return len(MARKUP.findall(text))


@dataclass(frozen=True)
class AtEqualStyle(Figure):
    """The accuracy σ(α) where both answers have the same style.

    The probability of being right is σ(α + γ·x) with the differences of style x[N, S] of both answers, fitted to
    credits[N]: a Bradley-Terry model with covariates, as in the style control of Chatbot Arena (Li et al. 2024).
    """

    credits: np.ndarray
    differences: np.ndarray
    scale = "share"

    def influence(self) -> Influence:
        counts = ~np.isnan(self.credits) & ~np.isnan(self.differences).any(axis=1)
        n = int(counts.sum())
        rows, shares = np.zeros(len(counts)), counts / max(n, 1)
        if not n:
            return Influence(NAN, rows, shares, 0)
        x, y = self.differences[counts], self.credits[counts]
        x = x / np.where(x.std(axis=0) > 0, np.sqrt((x**2).mean(axis=0)), 1.0)
        z = np.column_stack([np.ones(n), x])
        begun = np.vstack([z, np.eye(1, z.shape[1])]), np.append(y, 0.5)
        fitted, curvature = fit(*begun, np.array([0.0, *np.full(x.shape[1], PRIOR)]))
        value = float(logistic(fitted[0]))
        moved = value * (1 - value) * (z * (y - logistic(z @ fitted))[:, None]) @ np.linalg.inv(curvature)[0]
        rows[counts] = moved - moved.mean()
        return Influence(value, rows, shares, n)


# Rank correlations of scores and ratings, and the expected rating of the best-scored of N candidates: of scores[B],
# ratings[B] and groups[B] over the candidates of all lists, which `groups` numbers.


class BestOfN(NamedTuple):
    """The expected rating of one of `n` random candidates of a list, mean over the `lists` that have so many.

    `model` takes the best-scored one, `oracle` the best-rated, `random` any.
    """

    n: int
    lists: int
    model: Estimate
    oracle: Estimate
    random: Estimate


def spearman_within(scores: np.ndarray, ratings: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return Spearman's rho of each list, [G] by number.

    It is NaN for a list whose ratings are all equal, which has no order, and 0 for one whose scores are.
    """
    values = np.full(int(groups.max()) + 1 if len(groups) else 0, np.nan)
    for number, s, r in _by_size(groups, scores, ratings):
        ordered = np.ptp(r, axis=1) > 0
        values[number[ordered]] = _cosine(_centred_ranks(s[ordered]), _centred_ranks(r[ordered]))
    return values


def best_of_n(scores: np.ndarray, ratings: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return each list's curve for n from 1 to the longest list, exact over all ways to draw n without replacement.

    It is [G, 3, K], for the model, the oracle and a random pick; NaN beyond a list's length, and for one candidate.
    """
    sizes = np.bincount(groups) if len(groups) else np.zeros(0, dtype=int)
    curves = np.full((len(sizes), 3, int(sizes.max(initial=0))), np.nan)
    for number, s, r in _by_size(groups, scores, ratings):
        for kind, by in enumerate((s, r, np.zeros_like(r))):
            curves[number, kind, : s.shape[1]] = _expected(by, r)
    return curves


def _expected(scores: np.ndarray, ratings: np.ndarray) -> np.ndarray:
    """Return the expected rating of the best-scored of n candidates: [G, K] → [G, K], the column n - 1 for n.

    Of n candidates drawn from K, the one ranked i-th from below is the best in C(i - 1, n - 1) of C(K, n) draws.
    """
    size = scores.shape[1]
    below, n = np.arange(size)[:, None], np.arange(1, size + 1)[None, :]
    chance = comb(below, n - 1) / comb(size, n)
    order = np.argsort(scores, axis=1, kind="stable")
    ranked, ratings = np.take_along_axis(scores, order, axis=1), np.take_along_axis(ratings, order, axis=1)
    # Of those with the same score in its list, each has the mean rating.
    starts = np.ones(ranked.shape, dtype=bool)
    starts[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    codes = np.cumsum(starts.ravel()) - 1
    means = np.bincount(codes, weights=ratings.ravel()) / np.bincount(codes)
    return means[codes].reshape(ranked.shape) @ chance


def _by_size(groups: np.ndarray, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield for each size K of 2 or more the lists' numbers [G], and the columns of all of them stacked: [G, K]."""
    sizes = np.bincount(groups) if len(groups) else np.zeros(0, dtype=int)
    order = np.argsort(groups, kind="stable")
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 1]):
        indices = order[starts[sizes == size][:, None] + np.arange(size)]
        yield np.flatnonzero(sizes == size), *(column[indices] for column in columns)


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    return rankdata(values, axis=1) - (values.shape[1] + 1) / 2


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of a[G, M] with that of b; 0 where one of them is zero."""
    norm = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return np.divide((a * b).sum(axis=1), norm, out=np.zeros(len(a)), where=norm > 0)
