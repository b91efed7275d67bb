"""`vlmrm frames qualify`: figures of any scorer on episodes that it has not seen, and whether it is a reward there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import expit, logit
from tqdm import tqdm

from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.files import write_json
from vlmrm_robots.frames.checkpoint import LoadedClassifier, save_classifier
from vlmrm_robots.frames.classifier import FrameClassifier, model_input
from vlmrm_robots.frames.dataset import FrameIndex, index_files, outline_of
from vlmrm_robots.frames.qualification import HeldOut, Verdict, in_words, qualify
from vlmrm_robots.frames.settings import Limits
from vlmrm_robots.trajectories.pictures import as_picture
from vlmrm_robots.trajectories.trajectory import TrajectoryFile

if TYPE_CHECKING:
    from vlmrm_robots.trajectories.reward_models import PrefixScorer

BATCH = 128
WORST = 12  # frames of a line of the sheet


@dataclass(frozen=True)
class Evaluation:
    """Figures of a scorer above `threshold`, a classifier's probability or another's score.

    `reason` is None if they qualify it; `worst` are the highest failures, and the lowest successes, of its episodes.
    """

    scorer: str
    threshold: float
    metrics: dict[str, float]
    reason: str | None
    summary: str  # of the episodes, in words
    worst: list[tuple[str, str, list[tuple[TrajectoryFile, int]]]]

    def __str__(self) -> str:
        return f"{self.summary}\n{in_words(self.metrics, self.threshold)}"


def is_classifier(scorer: str) -> bool:
    """Return whether a scorer is a classifier of frames: a file that is no YAML, or a folder of LeRobot's."""
    path, described = Path(scorer), Path(scorer) / "config.json"
    if described.is_file():
        return '"reward_classifier"' in described.read_text(encoding="utf-8")
    return path.suffix in (".pt", ".safetensors") or (path.is_file() and path.suffix not in (".yaml", ".yml", ".py"))


def qualify_classifier(
    loaded: LoadedClassifier,
    files: Sequence[TrajectoryFile],
    limits: Limits,
    threshold: float | None = None,
) -> Evaluation:
    """Measure a classifier on episodes, but for those that it was trained on or chosen by.

    `threshold` is a probability, by default the checkpoint's; it is chosen for a checkpoint that nobody has measured.
    """
    config, path = loaded.config, loaded.path
    index, summary = index_files(files, config.image_keys, config.image_size)
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
    if threshold is None and config.qualified is not None:
        threshold = config.threshold
    logits = logits_of(loaded.model, index, range(len(index)))
    held_out = held_out_frames(index, np.arange(len(index)), logits)
    verdict = qualify(held_out, limits, None if threshold is None else float(logit(threshold)))
    return _evaluation(str(path), index, held_out, verdict, summary, float(expit(verdict.threshold)))


def qualify_scorer(
    scorer: PrefixScorer,
    name: str,
    files: Sequence[TrajectoryFile],
    limits: Limits,
    threshold: float | None = None,
    *,
    task: str | None = None,
    image_key: str | None = None,
    every: int = 1,
) -> Evaluation:
    """Measure a scorer of episodes by its score after every `every`-th step, and after those at which one succeeds.

    `threshold` is a score; by default it is chosen. `task` is the instruction of episodes that do not say theirs.
    """
    from vlmrm_robots.trajectories.reward_models import task_of

    key = image_key or files[0].keys[0]
    index, summary = index_files(files, [key])
    starts = [int(file.successes.argmax()) for file in index.files]  # of successes, and else of the episode
    numbers, scores = np.flatnonzero((index.steps % every == 0) | np.isin(index.steps, starts)), []
    for number, file in enumerate(tqdm(index.files, desc="scoring", unit="episode", disable=None)):
        steps = index.steps[numbers][index.owners[numbers] == number]
        try:
            scores += scorer.score_prefixes(task_of(file, task), [as_picture(file.frame(key, t)) for t in steps])
        except RowError as error:
            raise DataError(f"{name} has no scores of {file.path}: {error.reason}.") from error
    held_out = held_out_frames(index, numbers, np.array(scores, dtype=np.float64))
    verdict = qualify(held_out, limits, threshold)
    return _evaluation(name, index, held_out, verdict, summary, verdict.threshold)


def held_out_frames(index: FrameIndex, numbers: np.ndarray, scores: np.ndarray) -> HeldOut:
    """Return frames of an index, by their numbers, with their scores; DataError if one is no finite number."""
    if wrong := np.count_nonzero(~np.isfinite(scores)):
        raise DataError(f"{wrong} of {len(scores)} frames have a score that is no finite number: check the scorer.")
    owners = index.owners[numbers]
    return HeldOut(scores, index.labels[numbers], owners, index.steps[numbers], index.sceneries[owners])


def _evaluation(
    name: str, index: FrameIndex, held_out: HeldOut, verdict: Verdict, summary: str, threshold: float
) -> Evaluation:
    captions = zip(("failures that score highest", "successes that score lowest"), verdict.worst, strict=True)
    worst = [(text, index.keys[0], [(index.files[i], t) for i, t in frames[:WORST]]) for text, frames in captions]
    return Evaluation(name, threshold, verdict.figures, verdict.reason, summary, worst)


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
    content = {"scorer": evaluation.scorer, "threshold": evaluation.threshold, "metrics": metrics}
    write_json(output, content | {"qualified": evaluation.reason is None, "unqualified_because": evaluation.reason})


def record(evaluation: Evaluation, loaded: LoadedClassifier, output: Path) -> None:
    """Write the classifier with these figures, threshold and verdict in place of its own."""
    if output.exists() and (output != loaded.path or not loaded.described):
        raise ConfigError(f"{output} exists: name a new file, or the checkpoint itself if vlmrm wrote it.")
    update = {"threshold": evaluation.threshold, "metrics": evaluation.metrics, "qualified": evaluation.reason is None}
    config = loaded.config.model_copy(update={**update, "unqualified_because": evaluation.reason})
    save_classifier(output, loaded.model, config)
