"""`vlmrm frames eval`: a classifier's figures on episodes that it has not seen, and whether they qualify it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import numpy as np
import torch
from scipy.special import logit
from tqdm import tqdm

from vlmrm.errors import ConfigError, DataError
from vlmrm.files import write_json
from vlmrm_robots.frames.checkpoint import LoadedClassifier, save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, model_input
from vlmrm_robots.frames.dataset import FrameIndex, index_folders, outline_of
from vlmrm_robots.frames.qualification import (
    MAX_FALSE_FIRES,
    MIN_PRECISION,
    HeldOut,
    disqualification,
    figures,
    in_words,
)

BATCH = 128


@dataclass(frozen=True)
class Evaluation:
    """Figures of a classifier above `threshold`, a probability; `reason` is None if they qualify it."""

    path: Path
    threshold: float
    metrics: dict[str, float]
    reason: str | None
    summary: str  # of the episodes, in words

    def __str__(self) -> str:
        return f"{self.summary}\n{in_words(self.metrics, self.threshold)}"


def evaluate(
    loaded: LoadedClassifier,
    folders: Sequence[Path],
    threshold: float | None = None,
    max_false_fires: float = MAX_FALSE_FIRES,
    min_precision: float = MIN_PRECISION,
) -> Evaluation:
    """Measure a classifier on the episodes of folders, but for those that it was trained on or chosen by.

    `threshold` is of a success, by default the checkpoint's; the other two are as in `choose_threshold`.
    """
    config, path = loaded.config, loaded.path
    index, summary = index_folders(folders, config.image_keys, config.image_size)
    if index.crop != config.crop:
        crops = f"{config.crop or 'whole frames'}, and these frames have the crop {index.crop}"
        raise DataError(f"{path} was trained on {crops}: measure it on frames of its own.")
    known = set(config.episodes)
    new = [file for file in index.files if outline_of(file, config.image_keys) not in known]
    if not new:
        count = len(index.files)
        raise DataError(f"{path} was trained on or chosen by all {count} episodes ({summary}): measure it on others.")
    if left_out := len(index.files) - len(new):
        summary += f"; {left_out} episodes of its training are left out"
        index = FrameIndex(new, config.image_keys)
    logits = logits_of(loaded.model, index, range(len(index)))
    if not np.isfinite(logits).all():
        raise DataError(f"{path} scores {np.count_nonzero(~np.isfinite(logits))} frames with no finite number.")
    threshold = config.threshold if threshold is None else threshold
    metrics = figures(HeldOut(logits, index.labels, index.owners), float(logit(threshold)))
    metrics |= {"validation_frames": len(logits), "validation_successes": int(index.labels.sum())}
    return Evaluation(path, threshold, metrics, disqualification(metrics, max_false_fires, min_precision), summary)


@torch.inference_mode()
def logits_of(model: FrameClassifier, index: FrameIndex, numbers: Sequence[int]) -> np.ndarray:
    """Return the logits [N] of these frames of an index, float64."""
    logits, model = [], model.eval()
    for start in tqdm(range(0, len(numbers), BATCH), desc="scoring frames", unit="batch", disable=None):
        images = index.images(numbers[start : start + BATCH])
        scored = model({key: model_input(frames, model.device) for key, frames in images.items()})
        logits.append(scored.double().cpu().numpy())
    return np.concatenate(logits)


def write_evaluation(evaluation: Evaluation, output: Path) -> None:
    """Write the figures and the verdict as JSON; null where nothing was counted."""
    metrics = {name: None if isnan(value) else value for name, value in evaluation.metrics.items()}
    content = {"classifier": str(evaluation.path), "threshold": evaluation.threshold, "metrics": metrics}
    write_json(output, content | {"qualified": evaluation.reason is None, "unqualified_because": evaluation.reason})


def record(evaluation: Evaluation, loaded: LoadedClassifier, output: Path) -> None:
    """Write the classifier with these figures, threshold and verdict in place of its own."""
    if output.exists() and (output != loaded.path or not loaded.described):
        raise ConfigError(f"{output} exists: name a new file, or the checkpoint itself if vlmrm wrote it.")
    update = {"threshold": evaluation.threshold, "metrics": evaluation.metrics, "qualified": evaluation.reason is None}
    config = loaded.config.model_copy(update={**update, "unqualified_because": evaluation.reason})
    save_classifier(output, loaded.model, config)
