"""How well scores agree with preferences: small pure functions."""

from __future__ import annotations

import numpy as np
import pandas as pd

from vlmrm.evaluation.calibration import negative_log_likelihood

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def preference_accuracy(margins: np.ndarray) -> float:
    """Share of margins[N] above zero. Equal scores are not right; `score_ties` counts them. NaN for no pairs."""
    return float(np.mean(margins > 0)) if len(margins) else float("nan")


def groupwise_right(margins: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each group, in ascending order of groups[N]: whether all its margins are above zero."""
    _, codes = np.unique(groups, return_inverse=True)
    return np.bincount(codes, weights=margins <= 0) == 0


def distribution(values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation, range and quantiles of values[N]; all NaN for no values."""
    if not len(values):
        values = np.array([np.nan])
    quantiles = np.quantile(values, QUANTILES)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        **{f"q{round(100 * q):02d}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


def trl_summary(frame: pd.DataFrame) -> dict[str, float]:
    """Figures of `vlmrm.evaluation.frame.scored_pairs` under TRL's names, which dashboards know; exact over all."""
    chosen, rejected = (frame[f"{side}_score"].to_numpy(np.float64) for side in ("chosen", "rejected"))
    margins = (chosen - rejected)[~frame["tie"].to_numpy(bool)]
    rewards = np.concatenate([chosen, rejected])
    return {
        "loss": negative_log_likelihood(margins),
        "accuracy": preference_accuracy(margins),
        "margin": float(margins.mean()) if len(margins) else float("nan"),
        "margin_std": float(margins.std()) if len(margins) else float("nan"),
        "mean_reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "min_reward": float(rewards.min(initial=np.inf)),
        "max_reward": float(rewards.max(initial=-np.inf)),
        "pairs": len(margins),
    }
