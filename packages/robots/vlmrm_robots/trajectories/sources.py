"""The episodes that `vlmrm frames import` finds in folders and files, by their suffixes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from vlmrm.errors import DataError
from vlmrm_robots.trajectories import hdf5, rlinf
from vlmrm_robots.trajectories.importing import Episode, file_digest, read_pickled
from vlmrm_robots.trajectories.trajectory import listed


def episodes_in(positive: Path | None, negative: Path | None, mixed: Path | None = None) -> list[Episode]:
    """Return the episodes of a folder of positive and one of negative `.npy` files, and those of `mixed`.

    `mixed` is a folder or a file in which labels alone tell successes: RLinf's `.pkl` and `.pt`, or HDF5.
    """
    folders = [(folder, side) for folder, side in ((positive, True), (negative, False)) if folder is not None]
    if not folders and mixed is None:
        raise DataError("there is nothing to import: name the folders with --positive, --negative, or --episodes.")
    episodes = [
        Episode(path.name, partial(file_digest, path), partial(read_pickled, path), side)
        for folder, side in folders
        for path in _files_of(folder, [".npy"])
    ]
    return episodes if mixed is None else episodes + _mixed_episodes(mixed)


def _mixed_episodes(mixed: Path) -> list[Episode]:
    readers = {".pkl": rlinf.read_episode, ".pt": rlinf.read_payload}
    found: list[Episode] = []
    for path in [mixed] if mixed.is_file() else _files_of(mixed, [*readers, *hdf5.SUFFIXES]):
        if path.suffix in hdf5.SUFFIXES:
            found += _in_hdf5(path)
        elif path.suffix in readers:
            found.append(Episode(path.name, partial(file_digest, path), partial(readers[path.suffix], path)))
        else:
            raise DataError(f"{path} is no file of episodes: they are {listed([*readers, *hdf5.SUFFIXES])}.")
    return found


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
