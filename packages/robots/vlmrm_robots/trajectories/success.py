"""Scores as signs of a success: how well they tell successes from failures, and the probability that one stands for.

A preference score has no zero and no unit. On episodes whose outcome is known it gets both: a logistic curve from
scores to probabilities (Platt, Probabilistic outputs for support vector machines, 1999).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from scipy.stats import rankdata

from vlmrm.measures.intervals import NAN, Estimate, Figure, Influence, spread, with_ends

FOLDS = 10


@dataclass(frozen=True)
class AreaUnderCurve(Figure):
    """The probability that a success has the higher score of a success and a failure, ties as halves: scores[N].

    Its interval is that of Somers' D = 2 AUC - 1, on Fisher's scale; the influences are those of DeLong et al. (1988).
    """

    scores: np.ndarray
    successes: np.ndarray  # [N], bool

    def influence(self) -> Influence:
        """Return it as Somers' D, from -1 to 1; NaN without both successes and failures."""
        n, good = len(self.scores), np.asarray(self.successes, dtype=bool)
        counts = np.where(good, good.sum(), (~good).sum())
        if not n or good.all() or not good.any():
            return Influence(NAN, np.zeros(n), np.zeros(n), n)
        above = np.empty(n)  # share of the other class that a score is on the right side of
        for own in (good, ~good):
            ranks = rankdata(self.scores)[own] - rankdata(self.scores[own])  # those of the other class below it
            above[own] = ranks / (~own).sum()
        above = np.where(good, above, 1 - above)
        value = above[good].mean()
        return Influence(2 * value - 1, 2 * (above - value) / counts, 1 / (2 * counts), n)

    def estimate(self, prompts: np.ndarray) -> Estimate:
        influence = self.influence()
        difference = with_ends(influence, *spread(influence, prompts), "correlation")
        value, low, high = ((1 + end) / 2 for end in difference[:3])
        return difference._replace(value=value, low=low, high=high, standard_error=difference.standard_error / 2)


class Calibration(NamedTuple):
    """The curve p = σ(factor · score + offset) from a score to the probability of a success."""

    factor: float
    offset: float

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return the probability of a success for each of scores, of any shape."""
        return expit(self.factor * np.asarray(scores, dtype=np.float64) + self.offset)


def fitted_calibration(scores: np.ndarray, successes: np.ndarray) -> Calibration:
    """Return the likeliest curve for scores[N] of known outcome [N].

    As in Platt's method one success and one failure more are spread over the targets, so that scores that separate
    the two have a finite curve.
    """
    good = np.asarray(successes, dtype=bool)
    targets = np.where(good, (good.sum() + 1) / (good.sum() + 2), 1 / ((~good).sum() + 2))
    centre, scale = float(np.mean(scores)), float(np.std(scores)) or 1.0
    scaled = (np.asarray(scores, dtype=np.float64) - centre) / scale

    def loss(curve: np.ndarray) -> tuple[float, np.ndarray]:
        logits = curve[0] * scaled + curve[1]
        excess = expit(logits) - targets
        value = -(targets * log_expit(logits) + (1 - targets) * log_expit(-logits)).sum()
        return float(value), np.array([excess @ scaled, excess.sum()])

    slope, height = minimize(loss, np.zeros(2), jac=True, method="BFGS").x
    return Calibration(float(slope / scale), float(height - slope * centre / scale))


def held_out_calibrations(scores: np.ndarray, successes: np.ndarray) -> list[Calibration]:
    """Return for each of scores[N] the curve of the other folds, which its own outcome has no part in: [N].

    Each of at most `FOLDS` folds has its share of both outcomes, so two of each are needed; otherwise all are NaN.
    """
    good = np.asarray(successes, dtype=bool)
    folds = min(FOLDS, int(good.sum()), int((~good).sum()))
    if folds < 2:
        return [Calibration(NAN, NAN)] * len(good)
    number = np.where(good, np.cumsum(good), np.cumsum(~good)) % folds
    curves = [fitted_calibration(scores[number != fold], good[number != fold]) for fold in range(folds)]
    return [curves[fold] for fold in number]
