"""Episodes of robomimic and LIBERO: HDF5 files of `data/demo_N/obs/CAMERA` [T,H,W,C], `rewards` and `dones`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.errors import ConfigError, DataError
from vlmrm.frames.importing import Episode, file_digest, stored_as_bytes
from vlmrm.frames.trajectory import Trajectory, listed

SUFFIXES = (".hdf5", ".h5")
EXPANDS = 1100
CAMERAS = ("_image", "_rgb")  # how the names of pictures among the observations end


def episodes_of(path: Path) -> list[Episode]:
    """Return the episodes of a file; DataError if it has none, ConfigError without h5py."""
    with _opened(path) as file:
        demos = sorted(file["data"], key=lambda name: (len(name), name)) if "data" in file else []
    if not demos:
        raise DataError(f"{path} has no data/demo_N: it is no file of robomimic or LIBERO.")
    return [
        Episode(f"{path.name} {demo}", partial(_digest, path, demo), partial(read_demo, path, demo)) for demo in demos
    ]


def _digest(path: Path, demo: str) -> str:
    return f"{file_digest(path)} {demo}"


def read_demo(path: Path, demo: str) -> tuple[Trajectory, str]:
    """Read an episode of a file; its labels are its rewards, which both projects store as 1 for success.

    Raises:
        DataError: if it has no pictures, or rewards that are neither 0 nor 1.
    """
    subject = f"{path}: {demo}"
    with _opened(path) as file:
        group = file["data"][demo]
        observations = group.get("obs", {})
        cameras = [key for key in observations if key.endswith(CAMERAS) and len(observations[key].shape) == 4]
        if not cameras:
            raise DataError(
                f"{subject} has no pictures, but {listed(observations)}: add them with the project's own script."
            )
        if "rewards" not in group:
            raise DataError(f"{subject} has no rewards, but {listed(group)}: frames need labels.")
        rewards = np.asarray(group["rewards"], dtype=np.float32)
        images = {key.replace(".", "_"): _read(observations[key], subject).transpose(0, 3, 1, 2) for key in cameras}
    if not np.isin(rewards, (0, 1)).all():
        raise DataError(f"{subject} has rewards that are neither 0 nor 1: they do not say which frames succeed.")
    return stored_as_bytes(images, rewards, subject)


def _read(stored: Any, subject: str) -> np.ndarray:
    # Deflate expands a thousandfold at most; a set that was never written takes no space, and any shape.
    if stored.nbytes > EXPANDS * stored.id.get_storage_size():
        raise DataError(f"{subject}: {stored.name} claims {stored.nbytes:,} bytes that the file does not store.")
    return np.asarray(stored)


def _opened(path: Path) -> Any:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ConfigError(f"reading {path} needs h5py: pip install h5py.") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5 ({error}): copy it again.") from error
