"""`vlmrm frames import`: others' episodes, found in folders and files by their suffixes, into trajectory files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from vlmrm.errors import DataError
from vlmrm.files import make_folder
from vlmrm_robots.trajectories import hdf5, rlinf
from vlmrm_robots.trajectories.pickles import check_repeats, read_dictionary
from vlmrm_robots.trajectories.trajectory import (
    SUCCESS,
    Episode,
    Trajectory,
    file_digest,
    find_trajectory,
    listed,
    stored_as_bytes,
    write_trajectory,
)

logger = logging.getLogger("vlmrm")

READERS = {".pkl": rlinf.read_episode, ".pt": rlinf.read_payload}
SUFFIXES = [*READERS, *hdf5.SUFFIXES]


def episodes_in(positive: Path | None, negative: Path | None, mixed: Path | None = None) -> list[Episode]:
    """Return the episodes of a folder of positive and one of negative `.npy` files, and those of `mixed`.

    `mixed` is a folder or a file in which labels alone tell successes: RLinf's `.pkl` and `.pt`, or HDF5.
    """
    if positive is negative is mixed is None:
        raise DataError("there is nothing to import: name the folders with --positive, --negative, or --episodes.")
    found = [
        _episode(path, read_pickled, side)
        for folder, side in ((positive, True), (negative, False))
        if folder is not None
        for path in _files_of(folder, [".npy"])
    ]
    for path in [] if mixed is None else [mixed] if mixed.is_file() else _files_of(mixed, SUFFIXES):
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} is no file of episodes: they are {listed(SUFFIXES)}.")
        found += [_episode(path, READERS[path.suffix])] if path.suffix in READERS else _in_hdf5(path)
    return found


def _episode(path: Path, read: Callable[[Path], Trajectory], positive: bool | None = None) -> Episode:
    return Episode(path.name, partial(file_digest, path), partial(read, path), positive)


def _in_hdf5(path: Path) -> list[Episode]:
    try:
        return hdf5.episodes_of(path)
    except DataError as error:  # of this file alone: the others are imported

        def refuse(error: DataError = error) -> NoReturn:
            raise error

        return [Episode(path.name, refuse, refuse)]


def _files_of(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    files = [path for path in sorted(folder.glob("*")) if path.suffix in suffixes]
    if not files:
        raise DataError(
            f"there is no {' or '.join(suffixes)} file in {folder}: leave it out, or name the folder that has them."
        )
    return files


def read_pickled(path: Path) -> Trajectory:
    """Return the trajectory in a `.npy` file; DataError for other content."""
    content = read_dictionary(path)
    images, labels = content.get("images"), content.get("labels")
    if not isinstance(images, dict) or not images or not all(isinstance(key, str) for key in images):
        raise DataError(f"{path} has no images by key, but {sorted(map(str, content))}.")
    if labels is None:
        raise DataError(f"{path} has {sorted(map(str, content))} and no labels, of which each frame needs one.")
    wrong = [key for key, frames in images.items() if not isinstance(frames, np.ndarray)]
    if wrong or not isinstance(labels, np.ndarray):
        raise DataError(f"{path} has {'images ' + wrong[0] if wrong else 'labels'} that are no array.")
    check_repeats(path, [*images.values()])
    return stored_as_bytes(images, labels, str(path))


@dataclass(frozen=True)
class Imported:
    """The trajectories that an import wrote, and the counts of its files."""

    positive: list[Path]
    negative: list[Path]
    moved: int  # to the other side, by their labels
    earlier: int  # imported before


def import_episodes(
    episodes: Sequence[Episode], positive_dir: Path, negative_dir: Path, environment: str | None = None
) -> Imported:
    """Write episodes as trajectories; warn of those that succeed from their first frame on.

    A positive one without a successful frame counts as `success_once`; a negative one with such a frame becomes
    positive. Episodes that were imported before are left out, by their content.
    """
    folders = {True: positive_dir, False: negative_dir}
    for folder in folders.values():
        make_folder(folder)  # both, which a training asks for
    written: dict[bool, list[Path]] = {True: [], False: []}
    moved = earlier = 0
    always: list[str] = []  # succeed in every frame
    errors: dict[str, DataError] = {}
    for episode in tqdm(episodes, desc="import", unit="episode", disable=None):
        try:
            unique = sha256(episode.digest().encode()).hexdigest()[:16]
            if any(find_trajectory(folder, unique) for folder in folders.values()):
                earlier += 1
                continue
            trajectory = episode.read()
            if environment is not None:
                trajectory.metadata["environment"] = environment
            if episode.positive is not None:
                trajectory.metadata["success_once"] = str(episode.positive).lower()
            written[trajectory.positive].append(write_trajectory(folders[trajectory.positive], trajectory, unique))
        except DataError as error:
            errors[episode.name] = error
            continue
        moved += episode.positive not in (None, trajectory.positive)
        if len(trajectory.labels) > 1 and (trajectory.labels >= SUCCESS).all():
            always.append(episode.name)
    if always:
        logger.warning(
            "%d of %d episodes succeed in every frame (%s): if their labels say how an episode ends, a classifier "
            "learns that its beginning is a success; name a label of frames.",
            *(len(always), len(episodes), listed(always)),
        )
    imported = Imported(written[True], written[False], moved, earlier)
    if errors:
        first = next(iter(errors.values()))
        raise DataError(
            f"{len(errors)} of {len(episodes)} episodes were not imported ({listed(errors)}), beside "
            f"{summarise(imported)}; the first because {first}"
        )
    return imported


def summarise(imported: Imported) -> str:
    """Return the counts of an import in a sentence or two."""
    text = f"{len(imported.positive)} positive and {len(imported.negative)} negative trajectories"
    if imported.moved:
        text += f"; {imported.moved} are positive by a label though they were among the negative"
    if imported.earlier:
        text += f"; {imported.earlier} were there before"
    return text
