"""Pick-a-Pic: two images for a prompt, or a tie, one example a prompt.

The authors let a model tie: a pair whose probabilities are within a threshold is one. The threshold is the best of
eleven on `validation_unique`, which is therefore read and scored as well; figures are those of `test_unique`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.evaluation.public.definition import Benchmark, Source, accuracy, margins, published

VALIDATION, TEST = "validation_unique", "test_unique"
THRESHOLDS = np.arange(11) / 10


def _translate(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("caption", "jpg_0", "jpg_1", "label_0", "split", "has_label")
    return {name: row[name] for name in names if name in row}


def accuracy_at(frame: pd.DataFrame, threshold: float) -> float:
    """Mean credit: 1 for the same verdict as people's, 1/2 where one of the two says tie and the other does not."""
    difference = np.tanh(margins(frame) / 2)  # σ(margin) - σ(-margin)
    tie, model_ties = frame["tie"].astype(bool), np.abs(difference) <= threshold
    right = np.where(tie, model_ties, ~model_ties & (difference > 0))
    return float(np.mean(np.where(right, 1.0, np.where(tie | model_ties, 0.5, 0.0))))


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    validation, test = (frame[frame["by/split"] == split] for split in (VALIDATION, TEST))
    if test.empty:
        return {}
    figures = {"accuracy_threshold_0": accuracy_at(test, 0.0), "accuracy_without_ties": accuracy(test)}
    if validation.empty:
        return figures
    best = max(THRESHOLDS, key=lambda threshold: accuracy_at(validation, threshold))
    return {"accuracy": accuracy_at(test, best), "threshold": best, **figures}


PICK_A_PIC = Benchmark(
    name="pick-a-pic",
    title="Pick-a-Pic",
    source=Source("yuvalkirstain/pickapic_v1", (VALIDATION, TEST)),
    required=("caption", "jpg_0", "jpg_1", "label_0", "split"),
    translate=_translate,
    rule=_rule,
    columns=("split",),
    published=[
        *published(
            "Pick-a-Pic paper (arXiv 2305.01569), second-hand",
            ("accuracy",),
            {"PickScore": (70.2,), "one person": (68.0,)},
        ),
        *published("HPSv3 paper (arXiv 2508.03789), second-hand", ("accuracy_without_ties",), {"HPSv3": (72.8,)}),
    ],
    verified="Schema: the data card. Rule: the authors' eval_preference_predictor.py; probabilities are those of the "
    "scores as they are, as with PickScore's own scaled logits. Which rule the HPSv3 paper used for its figure could "
    "not be checked; it stands under `accuracy_without_ties`.",
)
