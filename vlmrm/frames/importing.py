"""`vlmrm frames import`: trajectories that `np.save` pickled into trajectory files.

Each is a dictionary of `images`, by key [T,C,H,W], and `labels` [T]. Frames are uint8, floats in [0, 1], or floats
from 0 to 255; which of the latter two is told by the greatest value in the whole file, over all its cameras.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vlmrm.errors import DataError
from vlmrm.frames.npy_pickle import read_dictionary
from vlmrm.frames.pixels import to_uint8
from vlmrm.frames.trajectory import Trajectory, trajectory_paths, write_trajectory
from vlmrm.frames.trajectory_file import open_trajectory

BYTES, UNIT, LARGE = "uint8", "floats in [0, 1]", "floats from 0 to 255"


@dataclass(frozen=True)
class Imported:
    """What an import wrote, by the kind of number that its files held; `moved` changed sides by their labels."""

    positive: list[Path]
    negative: list[Path]
    numbers: Counter[str]
    moved: int
    earlier: int


def import_trajectories(
    positive: Path | None, negative: Path | None, positive_dir: Path, negative_dir: Path, environment: str
) -> Imported:
    """Imports the `.npy` files of a folder of positive and a folder of negative trajectories.

    A positive file without a frame of success counts as `success_once`; a negative one with such a frame becomes
    positive. A file that was imported before is left out.

    Raises:
        DataError: after everything else was imported, when files could not be: how many, which, why the first.
    """
    folders = [(folder, was) for folder, was in ((positive, True), (negative, False)) if folder is not None]
    if not folders:
        raise DataError("there is nothing to import: name the folders with --positive, --negative.")
    sources = [(path, was) for folder, was in folders for path in _files(folder)]
    there = _imported(positive_dir) | _imported(negative_dir)
    written: dict[bool, list[Path]] = {True: [], False: []}
    numbers: Counter[str] = Counter()
    moved = earlier = 0
    refused: list[tuple[Path, DataError]] = []
    for path, was in tqdm(sources, desc="import", unit="file", disable=None):
        try:
            source = fingerprint(path)
            if source in there:
                earlier += 1
                continue
            trajectory, kind = read_pickled(path)
            trajectory.metadata |= {"environment": environment, "source": source, "success_once": str(was).lower()}
            folder = positive_dir if trajectory.positive else negative_dir
            written[trajectory.positive].append(write_trajectory(folder, trajectory))
        except DataError as error:
            refused.append((path, error))
            continue
        there.add(source)
        numbers[kind] += 1
        moved += trajectory.positive != was
    if refused:
        names = ", ".join(path.name for path, _ in refused[:5]) + (" ..." if len(refused) > 5 else "")
        raise DataError(
            f"{len(refused)} of {len(sources)} files were not imported ({names}), the first because {refused[0][1]}"
        )
    return Imported(written[True], written[False], numbers, moved, earlier)


def read_pickled(path: Path) -> tuple[Trajectory, str]:
    """One file as a trajectory, and which kind of number its frames were.

    Raises:
        DataError: when it holds something else than labelled frames.
    """
    content = read_dictionary(path)
    images, labels = content.get("images"), content.get("labels")
    if not isinstance(images, dict) or not images or not all(isinstance(key, str) for key in images):
        raise DataError(f"{path} has no images by key, but {sorted(map(str, content))}.")
    wrong = [key for key, frames in images.items() if not isinstance(frames, np.ndarray)]
    if wrong or not isinstance(labels, np.ndarray):
        raise DataError(f"{path} has {'images ' + wrong[0] if wrong else 'labels'} that are no array.")
    kinds = {key: _kind(frames, f"{path}: the images {key!r}") for key, frames in images.items()}
    scale = np.float32(255 if LARGE in kinds.values() else 1)
    stored = {
        key: to_uint8(frames if kinds[key] == BYTES else frames / scale, f"{path}: the images {key!r}")
        for key, frames in images.items()
    }
    if labels.dtype == bool or np.issubdtype(labels.dtype, np.integer):
        labels = labels.astype(np.float32)
    kind = next(kind for kind in (LARGE, UNIT, BYTES) if kind in kinds.values())
    return Trajectory(stored, labels), kind


def described(found: Imported) -> str:
    """What was imported, in a sentence or two."""
    kinds = ", ".join(f"{count} of {kind}" for kind, count in found.numbers.items()) or "none"
    text = f"{len(found.positive)} positive and {len(found.negative)} negative trajectories; files by frames: {kinds}"
    if found.moved:
        text += f"; {found.moved} are positive by a label though they were among the negative"
    if found.earlier:
        text += f"; {found.earlier} were imported before"
    return text


def fingerprint(path: Path) -> str:
    """What tells that a file was imported: a hash of its content."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path.") from error


def _kind(frames: np.ndarray, what: str) -> str:
    if frames.dtype == np.uint8:
        return BYTES
    if not np.issubdtype(frames.dtype, np.floating):
        raise DataError(f"{what} are {frames.dtype}: frames are uint8 or floats.")
    outside = int((~((frames >= 0) & (frames <= 255))).sum())
    if outside:
        raise DataError(f"{what} have {outside} of {frames.size} values that are outside [0, 255].")
    return LARGE if frames.size and frames.max() > 1 else UNIT


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.npy"))
    if not found:
        raise DataError(f"there is no .npy file in {folder}: leave it out, or name the folder that has them.")
    return found


def _imported(folder: Path) -> set[Any]:
    """The hashes of the files that were imported into a folder."""
    return {open_trajectory(path).metadata.get("source") for path in trajectory_paths(folder)} - {None}
