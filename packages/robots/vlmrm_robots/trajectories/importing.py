"""`vlmrm frames import`: others' episodes into trajectory files, whatever format they are in.

Frames are uint8, floats in [0, 1], or floats from 0 to 255: the greatest value of all cameras in an episode
distinguishes these two.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vlmrm.errors import DataError
from vlmrm.files import content_digest, make_folder
from vlmrm_robots.trajectories.pickles import read_dictionary
from vlmrm_robots.trajectories.trajectory import (
    SUCCESS,
    Trajectory,
    find_trajectory,
    listed,
    locked,
    to_uint8,
    write_trajectory,
)

logger = logging.getLogger("vlmrm")

BYTES, UNIT, LARGE = "uint8", "floats in [0, 1]", "floats from 0 to 255"


@dataclass(frozen=True)
class Imported:
    """The trajectories that an import wrote, and the counts of its files."""

    positive: list[Path]
    negative: list[Path]
    numbers: Counter[str]  # files by their kind of number
    moved: int  # to the other side, by their labels
    earlier: int  # imported before


@dataclass(frozen=True)
class Episode:
    """An episode to import: its name in messages, and how its content is identified and read."""

    name: str
    digest: Callable[[], str]
    read: Callable[[], tuple[Trajectory, str]]  # with the kind of number of its frames
    positive: bool | None = None  # if its folder says so


def import_episodes(episodes: Sequence[Episode], positive_dir: Path, negative_dir: Path, environment: str) -> Imported:
    """Write episodes as trajectories; warn of those that succeed from their first frame on.

    A positive one without a successful frame counts as `success_once`; a negative one with such a frame becomes
    positive. Episodes that were imported before are left out, by their content.
    """
    folders = {True: positive_dir, False: negative_dir}
    written: dict[bool, list[Path]] = {True: [], False: []}
    numbers: Counter[str] = Counter()
    moved = earlier = 0
    always: list[str] = []  # succeed in every frame
    errors: dict[str, DataError] = {}
    for episode in tqdm(episodes, desc="import", unit="episode", disable=None):
        try:
            unique = sha256(episode.digest().encode()).hexdigest()[:16]
            if any(find_trajectory(folder, unique) for folder in folders.values()):
                earlier += 1
                continue
            trajectory, kind = episode.read()
            trajectory.metadata["environment"] = environment
            if episode.positive is not None:
                trajectory.metadata["success_once"] = str(episode.positive).lower()
            make_folder(folder := folders[trajectory.positive])
            with locked(folder):  # another process may import the same
                if find_trajectory(folder, unique):
                    earlier += 1
                    continue
                written[trajectory.positive].append(write_trajectory(folder, trajectory, unique))
        except DataError as error:
            errors[episode.name] = error
            continue
        numbers[kind] += 1
        moved += episode.positive not in (None, trajectory.positive)
        if len(trajectory.labels) > 1 and (trajectory.labels >= SUCCESS).all():
            always.append(episode.name)
    if always:
        logger.warning(
            "%d of %d episodes succeed in every frame (%s): if their labels say how an episode ends, a classifier "
            "learns that its beginning is a success; name a label of frames.",
            *(len(always), len(episodes), listed(always)),
        )
    imported = Imported(written[True], written[False], numbers, moved, earlier)
    if errors:
        first = next(iter(errors.values()))
        raise DataError(
            f"{len(errors)} of {len(episodes)} episodes were not imported ({listed(errors)}), beside "
            f"{summarise(imported)}; the first because {first}"
        )
    return imported


def file_digest(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise DataError(f"{path} is no file: leave it out.")
    try:
        return content_digest(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path.") from error


def summarise(imported: Imported) -> str:
    """Return the counts of an import in a sentence or two."""
    kinds = ", ".join(f"{count} of {kind}" for kind, count in imported.numbers.items()) or "none"
    text = (
        f"{len(imported.positive)} positive and {len(imported.negative)} negative trajectories; episodes by frames: "
        f"{kinds}"
    )
    if imported.moved:
        text += f"; {imported.moved} are positive by a label though they were among the negative"
    if imported.earlier:
        text += f"; {imported.earlier} were imported before"
    return text


def read_pickled(path: Path) -> tuple[Trajectory, str]:
    """Return the trajectory in a file and the kind of number of its frames; DataError for any other content."""
    content = read_dictionary(path)
    images, labels = content.get("images"), content.get("labels")
    if not isinstance(images, dict) or not images or not all(isinstance(key, str) for key in images):
        raise DataError(f"{path} has no images by key, but {sorted(map(str, content))}.")
    wrong = [key for key, frames in images.items() if not isinstance(frames, np.ndarray)]
    if wrong or not isinstance(labels, np.ndarray):
        raise DataError(f"{path} has {'images ' + wrong[0] if wrong else 'labels'} that are no array.")
    return stored_as_bytes(images, labels, str(path))


def stored_as_bytes(images: Mapping[str, np.ndarray], labels: np.ndarray, subject: str) -> tuple[Trajectory, str]:
    """Return the trajectory of some frames [T,C,H,W] and labels [T], and the kind of number of the frames."""
    kinds = {key: _kind(frames, f"{subject}: the images {key!r}") for key, frames in images.items()}
    kind = next(kind for kind in (LARGE, UNIT, BYTES) if kind in kinds.values())
    # A dark camera of a file from 0 to 255 may not exceed 1 itself: the scale is that of the file.
    scale = np.float32(255 if kind == LARGE else 1)
    stored = {
        key: to_uint8(frames if kinds[key] == BYTES else frames / scale, f"{subject}: the images {key!r}")
        for key, frames in images.items()
    }
    if labels.dtype == bool or np.issubdtype(labels.dtype, np.integer):
        labels = labels.astype(np.float32)
    return Trajectory(stored, labels), kind


def _kind(frames: np.ndarray, subject: str) -> str:
    if frames.dtype == np.uint8:
        return BYTES
    if not np.issubdtype(frames.dtype, np.floating):
        raise DataError(f"{subject} are {frames.dtype}: frames are uint8 or floats.")
    outside = int((~((frames >= 0) & (frames <= 255))).sum())
    if outside:
        raise DataError(f"{subject} have {outside} of {frames.size} values that are outside [0, 255].")
    return LARGE if frames.size and frames.max() > 1 else UNIT
