"""The fit of a Bradley-Terry model, with covariates or without."""

from __future__ import annotations

import numpy as np

STEPS = 50  # of Newton's method


def logistic(values: np.ndarray) -> np.ndarray:
    """Return σ of the values, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * values))


def fit(z: np.ndarray, credits: np.ndarray, ridge: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return θ[P], the most likely with σ(z θ) as the chance of a credit, and the curvature [P, P] there.

    `z[N, P]` has a row for each comparison, `credits[N]` are 0 to 1, and `ridge[P]` are the weights of ½ θ².
    """
    theta, curvature = np.zeros(z.shape[1]), np.diag(ridge)
    for _ in range(STEPS):
        chances = logistic(z @ theta)
        curvature = (z.T * (chances * (1 - chances))) @ z + np.diag(ridge)
        step = np.clip(np.linalg.solve(curvature, z.T @ (credits - chances) - ridge * theta), -2, 2)
        theta = theta + step
        if np.abs(step).max() < 1e-9:
            break
    return theta, curvature
