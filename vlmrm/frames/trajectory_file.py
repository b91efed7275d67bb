"""Reads trajectory files: what is in them is checked when they are opened, and frames stay on disk until asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from vlmrm.errors import DataError
from vlmrm.frames.trajectory import (
    IMAGES,
    SUCCESS,
    VERSION,
    check_parts,
    listed,
    trajectory_paths,
)


@dataclass
class TrajectoryFile:
    """An open trajectory file, its labels in memory and its frames on disk; may be sent to other processes.

    `keys` are the cameras, `labels` float32 [T], `metadata` texts.
    """

    path: Path
    keys: list[str]
    labels: np.ndarray
    metadata: dict[str, str]
    shapes: dict[str, tuple[int, int, int]]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def successes(self) -> np.ndarray:
        """Whether each frame shows a success, bool [T]."""
        return self.labels >= SUCCESS

    def shape(self, key: str) -> tuple[int, int, int]:
        """[C,H,W] of a camera's frames."""
        return self.shapes[self._known(key)]

    def frame(self, key: str, i: int) -> np.ndarray:
        """Frame `i` of a camera, uint8 [C,H,W]; nothing else of the file is read."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has frames 0 to {len(self) - 1}, not {i}")
        return self._slices[self._known(key)][i : i + 1][0]

    def frames(self, key: str) -> np.ndarray:
        """All frames of a camera, uint8 [T,C,H,W]."""
        return self._slices[self._known(key)][:]

    def _known(self, key: str) -> str:
        if key not in self.shapes:
            raise DataError(f"{self.path} has no images {key!r}: it has {listed(self.keys)}.")
        return key

    @cached_property
    def _slices(self) -> dict[str, Any]:
        file = _opened(self.path)
        return {key: file.get_slice(IMAGES + key) for key in self.keys}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_slices"}  # a map of memory


def open_trajectory(path: Path) -> TrajectoryFile:
    """Opens a trajectory file; its frames stay on disk.

    Raises:
        DataError: when it is missing, corrupted, or its keys, lengths, shapes, types or values are not a trajectory's.
    """
    path = Path(path)
    file = _opened(path)
    try:
        names = list(file.keys())
        metadata = dict(file.metadata() or {})
        if "labels" not in names:
            raise DataError(f"{path} has no labels, but {listed(names)}: it is no trajectory.")
        labels = file.get_tensor("labels")
        there = {name.removeprefix(IMAGES): file.get_slice(name) for name in names if name.startswith(IMAGES)}
        shapes = {key: tuple(images.get_shape()) for key, images in there.items()}
        types = [images.get_dtype() for images in there.values()]
    except (SafetensorError, ValueError) as error:
        raise DataError(f"{path} is corrupted ({error}): delete it, or collect it anew.") from error
    stated = _stated_keys(path, metadata)
    if stated is not None and set(stated) != set(shapes):
        raise DataError(f"{path} says its images are {listed(stated)} and has {listed(shapes)}: delete it.")
    check_parts(shapes, types, labels, str(path))
    keys = list(shapes) if stated is None else stated
    return TrajectoryFile(path, keys, labels.astype(np.float32), metadata, {key: shapes[key][1:] for key in keys})


def open_folder(folder: Path) -> list[TrajectoryFile]:
    """Every trajectory of a folder.

    Raises:
        DataError: when there is none, or some cannot be opened: how many, which, and why the first cannot.
    """
    paths = trajectory_paths(folder)
    if not paths:
        raise DataError(_nothing_in(Path(folder)))
    opened: list[TrajectoryFile] = []
    refused: list[tuple[Path, DataError]] = []
    for path in paths:
        try:
            opened.append(open_trajectory(path))
        except DataError as error:
            refused.append((path, error))
    if refused:
        raise DataError(
            f"{len(refused)} of {len(paths)} files in {folder} cannot be used "
            f"({listed(path.name for path, _ in refused)}), the first because {refused[0][1]}"
        )
    return opened


def check_images(folder: Path, files: Sequence[TrajectoryFile], keys: Sequence[str], size: Sequence[int]) -> None:
    """Refuses trajectories of a folder without the cameras `keys`, or of another [C,H,W] than `size`.

    Raises:
        DataError: how many, and what one of them has.
    """
    for key in keys:
        without = [file for file in files if key not in file.keys]
        if without:
            raise DataError(
                f"{len(without)} of {len(files)} trajectories in {folder} have no images {key}, such as "
                f"{without[0].path.name}, which has {listed(without[0].keys)}: name another image key."
            )
        other = [file for file in files if list(file.shape(key)) != list(size)]
        if other:
            raise DataError(
                f"{len(other)} of {len(files)} trajectories in {folder} have images {key} of another size than "
                f"{list(size)}, such as {other[0].path.name}, whose are {list(other[0].shape(key))}: name their size "
                f"in image_size, or collect in one size."
            )


def _nothing_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}: check the path."
    inside = [sub.name for sub in sorted(folder.iterdir()) if trajectory_paths(sub)]
    if inside:
        return f"there is no trajectory in {folder}, but in its folders {listed(inside)}: name one of them."
    return f"there is no trajectory in {folder}: collect or import some (`vlmrm frames collect --help`)."


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise DataError(f"there is no trajectory {path}.") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is corrupted ({error}): delete it, or collect it anew.") from error


def _stated_keys(path: Path, metadata: Mapping[str, str]) -> list[str] | None:
    version = metadata.get("version", VERSION)
    if version != VERSION:
        raise DataError(f"{path} is a trajectory of version {version}, and this program reads version {VERSION}.")
    if "keys" not in metadata:
        return None
    try:
        keys = json.loads(metadata["keys"])
    except ValueError:
        keys = None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise DataError(f"{path} is corrupted (its keys are {metadata['keys']!r}): delete it, or collect it anew.")
    return keys
