"""Trajectories: the frames of one episode and, for each, whether the task was done in it; and how they are written.

One safetensors file a trajectory: `images.KEY` uint8 [T,C,H,W] for each camera, `labels` float32 [T], and texts about
where they come from. A file is whole or absent.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np
from safetensors.numpy import save

from vlmrm.errors import DataError
from vlmrm.files import make_folder, write_file

VERSION = "1"
SUFFIX = ".safetensors"
IMAGES = "images."
BYTES = ("uint8", "U8")  # NumPy's name, and that of safetensors
SUCCESS = 0.5  # a label from here on is a success


@dataclass
class Trajectory:
    """Frames uint8 [T,C,H,W] by camera key, and labels float32 [T] in [0, 1], each of the frame at its place.

    `metadata` are texts: `environment`, `seed`, and `success_once` ("true" where the environment said that the episode
    succeeded, whether or not a frame shows it); writing adds `keys`, `frames`, `successes` and `version`.
    """

    images: dict[str, np.ndarray]
    labels: np.ndarray
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def positive(self) -> bool:
        """Whether it belongs to the positive ones: a frame of it succeeded, or the environment says that it did."""
        return bool((self.labels >= SUCCESS).any()) or self.metadata.get("success_once") == "true"


def digest(images: Mapping[str, np.ndarray], labels: np.ndarray, about: Iterable[str] = ()) -> str:
    """Return 16 hex digits that tell equal frames and labels, and equal words about them, from others."""
    hashed = sha256(json.dumps([*about]).encode())
    for name, values in (*images.items(), ("", labels)):
        hashed.update(json.dumps([name, values.shape]).encode())
        hashed.update(np.ascontiguousarray(values).data)
    return hashed.hexdigest()[:16]


# Writing -------------------------------------------------------------------------------------------------------------


def write_trajectory(folder: Path, trajectory: Trajectory, unique: str | None = None) -> Path:
    """Writes a trajectory into `folder` under a name of its own, also when other processes write there.

    The name is a number and `unique`, which is 16 hex digits by chance unless it is given.

    Raises:
        DataError: when keys, lengths, shapes, types or values are not those of a trajectory.
        ConfigError: when it cannot be written there.
    """
    folder = Path(folder)
    shapes = {key: frames.shape for key, frames in trajectory.images.items()}
    types = [str(frames.dtype) for frames in trajectory.images.values()]
    check_parts(shapes, types, trajectory.labels, f"the trajectory for {folder}")
    labels = np.ascontiguousarray(trajectory.labels, dtype=np.float32)
    tensors = {IMAGES + key: np.ascontiguousarray(frames) for key, frames in trajectory.images.items()}
    about = trajectory.metadata | {
        "keys": json.dumps(list(trajectory.images)),
        "frames": str(len(labels)),
        "successes": str(int((labels >= SUCCESS).sum())),
        "version": VERSION,
    }
    make_folder(folder)
    path = folder / f"{_next_number(folder):06d}_{unique or uuid4().hex[:16]}{SUFFIX}"
    write_file(path, save({**tensors, "labels": labels}, about), durable=False)  # a cut one is found and named
    return path


def trajectory_paths(folder: Path) -> list[Path]:
    """The trajectory files of a folder, in the order of their names; none where there is no such folder."""
    return sorted(Path(folder).glob(f"*{SUFFIX}"))


def named(folder: Path, unique: str) -> Path | None:
    """Return the file of a folder that `write_trajectory` was given this name for."""
    return next((folder / name for name in os.listdir(folder) if name.endswith(f"_{unique}{SUFFIX}")), None)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps other processes that ask for it out of `folder`; a process that ends, however it does, lets go."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _next_number(folder: Path) -> int:
    numbers = (name.partition("_")[0] for name in os.listdir(folder) if name.endswith(SUFFIX))
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1


# Checking ------------------------------------------------------------------------------------------------------------


def check_parts(shapes: Mapping[str, tuple[int, ...]], types: Iterable[str], labels: np.ndarray, what: str) -> None:
    """Refuses what is no trajectory, by the shapes and types of its images, with a sentence that begins with `what`.

    Raises:
        DataError: naming what is wrong, and how much of it.
    """
    if not shapes:
        raise DataError(f"{what} has no images.")
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(
            f"{what} has labels of shape {list(labels.shape)}: one for each of at least one frame is needed."
        )
    for key, shape in shapes.items():
        if len(shape) != 4 or shape[1] not in (1, 3):
            raise DataError(
                f"{what} has images {key!r} of shape {list(shape)}: they are [T,C,H,W] with 1 or 3 channels."
            )
        if shape[0] != len(labels):
            raise DataError(
                f"{what} has {shape[0]} frames of {key!r} and {len(labels)} labels: there is one for each."
            )
    wrong = [name for name in types if name not in BYTES]
    if wrong:
        raise DataError(f"{what} has images of {listed(wrong)}: frames of a trajectory are uint8.")
    if not np.issubdtype(labels.dtype, np.floating):
        raise DataError(f"{what} has labels of {labels.dtype}: they are float32.")
    outside = int((~((labels >= 0) & (labels <= 1))).sum())
    if outside:
        raise DataError(f"{what} has {outside} of {len(labels)} labels outside [0, 1].")


def listed(names: Iterable[object]) -> str:
    """The first few of some names."""
    names = list(dict.fromkeys(names))
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"
