"""Trajectories: the frames of an episode with a success label for each, and the safetensors files that hold them.

A file has `images.KEY` uint8 [T,C,H,W] for each camera, `labels` float32 [T], and metadata about their origin. Files
are written atomically.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vlmrm.errors import DataError
from vlmrm.files import content_digest, make_folder, plain_write_errors, write_file

VERSION = "1"
SUFFIX = ".safetensors"
RECORD = ".written"  # the file of a folder's names, a line each
IMAGES = "images."
SUCCESS = 0.5  # labels from here on are successes


@dataclass
class Trajectory:
    """Frames uint8 [T,C,H,W] by camera, and the label float32 [T] in [0, 1] of each.

    `metadata` has `environment`, `seed`, and `success_once` ("true" if the environment reported a success, whether or
    not a frame shows it); writing adds `keys`, `frames`, `successes` and `version`.
    """

    images: dict[str, np.ndarray]
    labels: np.ndarray
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def positive(self) -> bool:
        """True if a frame is a success, or the environment reported one."""
        return bool((self.labels >= SUCCESS).any()) or self.metadata.get("success_once") == "true"


def digest(images: Mapping[str, np.ndarray], labels: np.ndarray, context: Iterable[str] = ()) -> str:
    """Return a hash of frames, labels and texts about them, 16 hex digits."""
    hashed = sha256(json.dumps([*context]).encode())
    for name, values in (*images.items(), ("", labels)):
        hashed.update(json.dumps([name, values.shape]).encode())
        hashed.update(np.ascontiguousarray(values).data)
    return hashed.hexdigest()[:16]


# Writing -------------------------------------------------------------------------------------------------------------


def write_trajectory(folder: Path, trajectory: Trajectory, unique: str | None = None) -> Path:
    """Write `folder/{number}_{unique}.safetensors`, safely beside other processes; `unique` is random by default."""
    folder = Path(folder)
    shapes = {key: frames.shape for key, frames in trajectory.images.items()}
    types = [str(frames.dtype) for frames in trajectory.images.values()]
    _validate(shapes, types, trajectory.labels, f"the trajectory for {folder}")
    labels = np.ascontiguousarray(trajectory.labels, dtype=np.float32)
    tensors = {IMAGES + key: np.ascontiguousarray(frames) for key, frames in trajectory.images.items()}
    metadata = trajectory.metadata | {
        "keys": json.dumps(list(trajectory.images)),
        "frames": str(len(labels)),
        "successes": str(int((labels >= SUCCESS).sum())),
        "version": VERSION,
    }
    make_folder(folder)
    path = folder / f"{_next_number(folder):06d}_{unique or uuid4().hex[:16]}{SUFFIX}"
    with plain_write_errors(folder / RECORD), open(folder / RECORD, "a") as record:
        record.write(f"{path.name}\n")  # before the file, so that no process misses it
    # Without fsync: a file that a power cut truncates is refused by its reader, and can be collected again.
    write_file(path, save({**tensors, "labels": labels}, metadata), durable=False)
    return path


def trajectory_paths(folder: Path) -> list[Path]:
    """Return the trajectory files of a folder by name; none if there is no such folder."""
    return sorted(Path(folder).glob(f"*{SUFFIX}"))


def find_trajectory(folder: Path, unique: str) -> Path | None:
    """Return the file that `write_trajectory` wrote under this `unique` name; None also if there is no such folder."""
    names = _record(folder).read_text() if folder.is_dir() else ""
    before, found, _ = names.rpartition(f"_{unique}{SUFFIX}\n")
    path = folder / (before.rpartition("\n")[2] + found).rstrip()
    return path if found and path.exists() else None


def holds(folder: Path, count: int) -> bool:
    """Return whether a folder has `count` trajectories or more, without listing it as long as fewer were written."""
    return _next_number(folder) >= count and len(trajectory_paths(folder)) >= count


def _record(folder: Path) -> Path:
    """Return the file of the names that a folder's files were given: listing it would make its n-th file cost n."""
    if not (record := folder / RECORD).exists():
        names = "".join(f"{path.name}\n" for path in trajectory_paths(folder))
        write_file(record, names, durable=False, exclusive=True)
    return record


def _next_number(folder: Path) -> int:
    with open(_record(folder), "rb") as record:
        record.seek(max(record.seek(0, os.SEEK_END) - 300, 0))  # before the last name
        number = record.read().rstrip().rpartition(b"\n")[2].partition(b"_")[0]
    return int(number) + 1 if number.isdigit() else 0


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold an exclusive lock on `folder`, which the operating system releases even if the process is killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Validation ----------------------------------------------------------------------------------------------------------


def _validate(shapes: Mapping[str, tuple[int, ...]], types: Iterable[str], labels: np.ndarray, subject: str) -> None:
    """Raise DataError, a sentence about `subject`, unless its parts make a trajectory."""
    if not shapes:
        raise DataError(f"{subject} has no images.")
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(f"{subject} has labels of shape {list(labels.shape)}: each frame of at least one needs one.")
    for key, shape in shapes.items():
        if not key or not key.isprintable():
            raise DataError(f"{subject} has images named {key!r}: name them by letters that can be printed.")
        if len(shape) != 4 or shape[1] not in (1, 3):
            needed = "they are [T,C,H,W] with 1 or 3 channels"
            raise DataError(f"{subject} has images {key!r} of shape {list(shape)}: {needed}.")
        if shape[0] != len(labels):
            counts = f"{shape[0]} frames of {key!r} and {len(labels)} labels"
            raise DataError(f"{subject} has {counts}: each frame needs one.")
    if wrong := [name for name in types if name not in ("uint8", "U8")]:
        raise DataError(f"{subject} has images of {listed(wrong)}: frames of a trajectory are uint8.")
    if not np.issubdtype(labels.dtype, np.floating):
        raise DataError(f"{subject} has labels of {labels.dtype}: they are float32.")
    if outside := int((~((labels >= 0) & (labels <= 1))).sum()):  # counts NaN too
        raise DataError(f"{subject} has {outside} of {len(labels)} labels outside [0, 1].")


def listed(names: Iterable[object]) -> str:
    """Return the first five names in a line, and the number of the remaining ones."""
    names = list(dict.fromkeys(names))
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"


# Reading -------------------------------------------------------------------------------------------------------------


@dataclass
class TrajectoryFile:
    """An open trajectory file: `labels` float32 [T] in memory, frames on disk until they are read; can be pickled."""

    path: Path
    keys: list[str]  # the cameras
    labels: np.ndarray
    metadata: dict[str, str]
    shapes: dict[str, tuple[int, int, int]]  # [C,H,W] by camera

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def successes(self) -> np.ndarray:
        """The frames that are successes, bool [T]."""
        return self.labels >= SUCCESS

    @property
    def way(self) -> range:
        """The frames up to the first success, or all of a failure."""
        return range(int(self.successes.argmax()) + 1 if self.successes.any() else len(self))

    def frame(self, key: str, i: int) -> np.ndarray:
        """Read frame `i` of a camera, uint8 [C,H,W], and nothing else of the file."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has frames 0 to {len(self) - 1}, not {i}")
        return self._stored(key)[i : i + 1][0]

    def frames(self, key: str) -> np.ndarray:
        """Read all frames of a camera, uint8 [T,C,H,W]."""
        return self._stored(key)[:]

    def _stored(self, key: str) -> Any:
        if key not in self.shapes:
            raise DataError(f"{self.path} has no images {key!r}: it has {listed(self.keys)}.")
        return self._slices[key]

    @cached_property
    def _slices(self) -> dict[str, Any]:
        file = _open_file(self.path)
        return {key: file.get_slice(IMAGES + key) for key in self.keys}

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps cannot be sent to DataLoader workers, which open the file themselves.
        return {name: value for name, value in self.__dict__.items() if name != "_slices"}


def open_trajectory(path: Path) -> TrajectoryFile:
    """Open and validate a trajectory file; its frames stay on disk."""
    path = Path(path)
    file = _open_file(path)
    try:
        names, metadata = list(file.keys()), dict(file.metadata() or {})
        if "labels" not in names:
            raise DataError(f"{path} has no labels, but {listed(names)}: it is no trajectory.")
        labels = file.get_tensor("labels")
        images = {name.removeprefix(IMAGES): file.get_slice(name) for name in names if name.startswith(IMAGES)}
        shapes = {key: tuple(values.get_shape()) for key, values in images.items()}
        types = [values.get_dtype() for values in images.values()]
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:  # the last two of types NumPy lacks
        raise _corrupted(path, error) from error
    version = metadata.get("version", VERSION)
    if version != VERSION:
        raise DataError(f"{path} is a trajectory of version {version}, and this program reads version {VERSION}.")
    try:  # the cameras in the order in which they were written: safetensors sorts its names
        keys = [str(key) for key in json.loads(metadata["keys"])] if "keys" in metadata else list(shapes)
    except (ValueError, TypeError):
        raise _corrupted(path, f"its keys are {metadata['keys']!r}") from None
    if set(keys) != set(shapes):
        raise DataError(f"{path} says its images are {listed(keys)} and has {listed(shapes)}: delete it.")
    _validate(shapes, types, labels, str(path))
    return TrajectoryFile(path, keys, labels.astype(np.float32), metadata, {key: shapes[key][1:] for key in keys})


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise DataError(f"there is no trajectory {path}.") from error
    except (SafetensorError, OSError) as error:
        raise _corrupted(path, error) from error


def _corrupted(path: Path, reason: object) -> DataError:
    return DataError(f"{path} is corrupted ({reason}): delete it, or collect it anew.")


def open_folder(folder: Path) -> list[TrajectoryFile]:
    """Open every trajectory of a folder."""
    paths = trajectory_paths(folder)
    if not paths:
        where = Path(folder)
        inside = [sub.name for sub in sorted(where.glob("*/")) if trajectory_paths(sub)]
        found = f", but in its folders {listed(inside)}" if inside else ": collect or import some"
        raise DataError(f"there is no {'trajectory in' if where.is_dir() else 'folder'} {where}{found}.")
    opened: list[TrajectoryFile] = []
    errors: dict[str, DataError] = {}
    for path in paths:
        try:
            opened.append(open_trajectory(path))
        except DataError as error:
            errors[path.name] = error
    if errors:
        count, first = f"{len(errors)} of {len(paths)} files in {folder}", next(iter(errors.values()))
        raise DataError(f"{count} cannot be used ({listed(errors)}), the first because {first}")
    return opened


def check_images(
    folder: Path, files: Sequence[TrajectoryFile], keys: Sequence[str], size: Sequence[int] | None
) -> None:
    """Raise DataError if trajectories of a folder lack one of the cameras `keys`, or their frames are not `size`."""
    for key in keys:
        if lacking := [file for file in files if key not in file.keys]:
            raise DataError(
                f"{len(lacking)} of {len(files)} trajectories in {folder} have no images {key}, such as "
                f"{lacking[0].path.name}, which has {listed(lacking[0].keys)}: name another image key."
            )
        if size and (resized := [file for file in files if list(file.shapes[key]) != list(size)]):
            raise DataError(
                f"{len(resized)} of {len(files)} trajectories in {folder} have images {key} of another size than "
                f"{list(size)}, such as {resized[0].path.name}, whose are {list(resized[0].shapes[key])}: name their "
                "size in image_size, or collect in one size."
            )


# Numbers -------------------------------------------------------------------------------------------------------------


def to_uint8(frames: np.ndarray, subject: str) -> np.ndarray:
    """Return frames as they are stored, uint8; floats in [0, 1] are scaled by 255 and rounded."""
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise DataError(f"{subject} are {frames.dtype}: frames are uint8, or floats from 0 to 1.")
    if outside := int((~((frames >= 0) & (frames <= 1))).sum()):  # counts NaN too
        raise DataError(
            f"{subject} have {outside} of {frames.size} values outside [0, 1], from {np.min(frames):g} to "
            f"{np.max(frames):g}: give uint8, or floats from 0 to 1."
        )
    return np.rint(frames * 255).astype(np.uint8)


def to_unit(frames: np.ndarray) -> np.ndarray:
    """Return uint8 frames as float32 in [0, 1], of the same shape."""
    return frames.astype(np.float32) / np.float32(255)


# Others' episodes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode:
    """An episode to import: its name in messages, and how its content is identified and read."""

    name: str
    digest: Callable[[], str]
    read: Callable[[], Trajectory]
    positive: bool | None = None  # if its folder says so


def file_digest(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise DataError(f"{path} is no file: leave it out.")
    try:
        return content_digest(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check the path.") from error


def stored_as_bytes(images: Mapping[str, np.ndarray], labels: np.ndarray, subject: str) -> Trajectory:
    """Return the trajectory of frames [T,C,H,W], bytes or floats up to 1 or to 255, and labels [T]."""
    floats = {key: frames for key, frames in images.items() if frames.dtype != np.uint8}
    for key, frames in floats.items():
        if not np.issubdtype(frames.dtype, np.floating):
            raise DataError(f"{subject}: the images {key!r} are {frames.dtype}: frames are uint8 or floats.")
        if outside := int((~((frames >= 0) & (frames <= 255))).sum()):
            counted = f"{outside} of {frames.size} values that are outside [0, 255]"
            raise DataError(f"{subject}: the images {key!r} have {counted}.")
    # A dark camera of a file from 0 to 255 may not exceed 1 itself: the scale is that of the file.
    scale = np.float32(255 if any(frames.max(initial=0) > 1 for frames in floats.values()) else 1)
    stored = {
        key: to_uint8(frames / scale if key in floats else frames, f"{subject}: the images {key!r}")
        for key, frames in images.items()
    }
    if labels.dtype == bool or np.issubdtype(labels.dtype, np.integer):
        labels = labels.astype(np.float32)
    return Trajectory(stored, labels)
