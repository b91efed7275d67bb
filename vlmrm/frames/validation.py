"""What a classifier of frames is worth on frames held out from it, and from which probability it says yes."""

from __future__ import annotations

import numpy as np
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from vlmrm.evaluation.calibration import (
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
    squared_errors,
)


def auc_and_loss(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Area under the ROC curve and mean binary cross-entropy of logits[N] for labels[N] of 0 and 1."""
    return float(roc_auc_score(labels, logits)), negative_log_likelihood(_for_what_happened(logits, labels))


def threshold_logit(logits: np.ndarray, labels: np.ndarray, target_fpr: float) -> float:
    """The lowest logit above which at most the share `target_fpr` of the failures lies.

    It is half-way to the next score above it, where nothing held out changes sides.
    """
    failures = np.sort(logits[labels == 0])[::-1]
    lowest = failures[int(target_fpr * len(failures))]
    above = logits[logits > lowest]
    return float((lowest + above.min()) / 2 if len(above) else lowest)


def measures(logits: np.ndarray, labels: np.ndarray, threshold: float) -> dict[str, float]:
    """Figures of logits[N] for labels[N] of 0 and 1; `threshold` is a logit.

    Precision is NaN where nothing is taken for a success.
    """
    auc, loss = auc_and_loss(logits, labels)
    said, happened = logits > threshold, labels == 1
    margins = _for_what_happened(logits, labels)
    return {
        "auc": auc,
        "loss": loss,
        "precision": float(happened[said].mean()) if said.any() else float("nan"),
        "recall": float(said[happened].mean()),
        "false_positive_rate": float(said[~happened].mean()),
        "calibration_error": expected_calibration_error(reliability(margins)),
        "brier": float(squared_errors(margins).mean()),
    }


def probability(logit: float) -> float:
    return float(expit(logit))


def _for_what_happened(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Logits of the event that took place, as `vlmrm.evaluation.calibration` takes them."""
    return np.where(labels == 1, logits, -logits).astype(np.float64)
