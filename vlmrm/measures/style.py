"""Style: how much markup a text has, and the accuracy of a model where both answers have the same style."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from vlmrm.measures.bradley_terry import fit, logistic
from vlmrm.measures.intervals import NAN, Figure, Influence, Scale

# Headings, items of lists, code blocks and rules at the start of a line; bold text and inline code anywhere.
MARKUP = re.compile(r"^\s*(?:#{1,6}\s|[-*+]\s|\d+[.)]\s|```|---)|\*\*[^*\n]+\*\*|`[^`\n]+`", re.MULTILINE)
PRIOR = 0.5  # weight of each slope; the fit begins with half a pair of equal style that is right, and half a wrong one


def markup(text: str) -> int:
    """Return how many pieces of markdown a text has."""
    return len(MARKUP.findall(text))


@dataclass(frozen=True)
class AtEqualStyle(Figure):
    """The accuracy where both answers have the same style.

    The probability of being right is σ(α + γ·x) with the differences of style x[N, S] of the chosen and the rejected
    answer, fitted to credits[N]: a Bradley-Terry model with covariates, as in the style control of Chatbot Arena
    (Li et al. 2024). The figure is σ(α). Rows with a NaN do not count.
    """

    credits: np.ndarray
    differences: np.ndarray

    @property
    def on(self) -> Scale:
        return "share"

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
