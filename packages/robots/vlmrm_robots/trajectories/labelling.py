"""`vlmrm frames label`: trajectories with the labels of a judge in place of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.files import make_folder
from vlmrm.scoring.protocol import PrefixScorer
from vlmrm_robots.trajectories.pairs import task_of
from vlmrm_robots.trajectories.pictures import as_picture
from vlmrm_robots.trajectories.trajectory import Trajectory, TrajectoryFile, digest, find_trajectory, write_trajectory


@dataclass(frozen=True)
class Labelled:
    """Episodes that were labelled and the counts of their frames; `earlier` were labelled before."""

    positive: int
    negative: int
    frames: int
    successes: int
    agreed: int  # frames whose label is as it was
    moved: int  # episodes that have a success now and had none, or the other way round
    earlier: int


def label_episodes(
    scorer: PrefixScorer,
    files: Sequence[TrajectoryFile],
    positive_dir: Path,
    negative_dir: Path,
    *,
    judge: str,
    above: float,
    task: str | None = None,
    image_key: str | None = None,
) -> Labelled:
    """Write each trajectory anew, with a success where its frame alone scores above `above`.

    An episode that the folders have with these labels is not scored again, so that an interrupted labelling goes on.

    Args:
        judge: the scorer's name, which the trajectories say.
        task: the instruction of trajectories that do not say theirs.
        image_key: the camera that is judged. Default: the first.
    """
    folders = {True: Path(positive_dir), False: Path(negative_dir)}
    for folder in folders.values():
        if folder.resolve() in {file.path.parent.resolve() for file in files}:
            raise ConfigError(f"{folder} has the episodes themselves: name another folder for their new labels.")
        make_folder(folder)
    counts = dict.fromkeys(Labelled.__dataclass_fields__, 0)
    for file in tqdm(files, desc="labelling", unit="episode", disable=None):
        key, instruction = image_key or file.keys[0], task_of(file, task)
        declared = f"{judge} > {above:g} for {instruction!r}"
        images = {name: file.frames(name) for name in file.keys}
        unique = digest(images, file.labels, [declared, key])
        if any(find_trajectory(folder, unique) for folder in folders.values()):
            counts["earlier"] += 1
            continue
        labels = np.array([_score(scorer, instruction, file, key, step) > above for step in range(len(file))])
        metadata = {**file.metadata, "declared_success": declared, "success_once": "false"}
        trajectory = Trajectory(images, labels.astype(np.float32), metadata)
        write_trajectory(folders[trajectory.positive], trajectory, unique)
        counts["positive" if trajectory.positive else "negative"] += 1
        counts["frames"] += len(labels)
        counts["successes"] += int(labels.sum())
        counts["agreed"] += int((labels == file.successes).sum())
        counts["moved"] += bool(labels.any()) != bool(file.successes.any())
    return Labelled(**counts)


def _score(scorer: PrefixScorer, task: str, file: TrajectoryFile, key: str, step: int) -> float:
    try:
        [score] = scorer.score_prefixes(task, [as_picture(file.frame(key, step))])
    except RowError as error:
        raise DataError(f"frame {step} of {file.path} has no score: {error.reason}.") from error
    return score


def summarise(labelled: Labelled) -> str:
    """Return the counts in a sentence or two."""
    text = (
        f"{labelled.positive} positive and {labelled.negative} negative trajectories, {labelled.frames} frames of "
        f"which {labelled.successes} show success"
    )
    if labelled.frames:
        text += (
            f"; {labelled.agreed / labelled.frames:.1%} of the frames keep their label, and {labelled.moved} episodes "
            "change sides"
        )
    if labelled.earlier:
        text += f"; {labelled.earlier} episodes were labelled before"
    return text
