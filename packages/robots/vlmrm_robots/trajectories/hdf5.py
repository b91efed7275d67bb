"""Episodes of robomimic and LIBERO: HDF5 files of `data/demo_N` with `obs/CAMERA` [T,H,W,C] and `rewards` [T].

A frame's label is of what it shows. robomimic's reward of a row is of the state after its action, which `next_obs`
shows, or else `obs` of the next row; the first state has none, and is left out. LIBERO shows the state after the
action, but its rewards only mark the last row. By then success has been held for some rows, of which it says nothing:
they are left out.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.errors import ConfigError, DataError, first_line
from vlmrm_robots.trajectories.trajectory import Episode, Trajectory, file_digest, listed, stored_as_bytes

SUFFIXES = (".hdf5", ".h5")
CAMERAS = ("_image", "_rgb")  # how the names of pictures among the observations end
HELD = 11  # rows of success before the last, after which LIBERO's script ends a demonstration
LIBERO = "bddl_file_name"  # what only its script says of the data
EXPANDS = 1100  # times: what deflate expands at most
MOST_BYTES = 8 << 30  # of an episode's frames, which are all in memory at once


def episodes_of(path: Path) -> list[Episode]:
    """Return the episodes of a file; DataError if it has none, ConfigError without h5py."""
    with _opened(path) as file:
        demos = sorted(file.get("data", ()), key=lambda name: (len(name), name))
    if not demos:
        raise DataError(f"{path} has no data/demo_N: it is no file of robomimic or LIBERO.")
    return [
        Episode(f"{path.name} {demo}", lambda demo=demo: f"{file_digest(path)} {demo}", partial(read_demo, path, demo))
        for demo in demos
    ]


def read_demo(path: Path, demo: str) -> Trajectory:
    """Read an episode of a file: its cameras, and the success that its rewards say of each frame."""
    subject = f"{path}: {demo}"
    with _opened(path) as file:
        group = file["data"][demo]
        if "rewards" not in group:
            raise DataError(f"{subject} has no rewards, but {listed(group)}: frames need labels.")
        rewards = np.asarray(group["rewards"], dtype=np.float32)
        if rewards.ndim != 1 or not np.isin(rewards, (0, 1)).all():
            raise DataError(f"{subject} has rewards that are not each 0 or 1: write it anew with sparse rewards.")
        shown, rows, labels = _labelled_rows(group, rewards, LIBERO in file["data"].attrs)
        if not len(labels):
            raise DataError(f"{subject} has a single row, and no frame of the state after it.")
        cameras = _cameras(group.get(shown, {}))
        if not cameras:
            has = listed(group.get(shown, {}))
            raise DataError(f"{subject} has no pictures, but {has}: add them with the project's own script.")
        for stored in cameras.values():
            _check_stored(stored, len(rewards), file.filename, subject)
        if sum(stored.nbytes for stored in cameras.values()) > MOST_BYTES:
            raise DataError(f"{subject} has frames of more than {MOST_BYTES >> 30} GiB: split it.")
        images = {key.replace(".", "_"): stored[:][rows].transpose(0, 3, 1, 2) for key, stored in cameras.items()}
    trajectory = stored_as_bytes(images, labels, subject)
    trajectory.metadata["success_once"] = str(bool(rewards.any())).lower()
    return trajectory


def _labelled_rows(group: Any, rewards: np.ndarray, libero: bool) -> tuple[str, np.ndarray, np.ndarray]:
    """Return which observations show states that have labels, in which rows [N], and the labels [N]."""
    rows = np.arange(len(rewards))
    if libero and rewards[-1:].all() and not rewards[:-1].any():  # as its script writes them
        rows = rows[(rows < len(rows) - 1 - HELD) | (rows == len(rows) - 1)]
        return "obs", rows, rewards[rows]
    if libero or _cameras(group.get("next_obs", {})):
        return "obs" if libero else "next_obs", rows, rewards
    return "obs", rows[1:], rewards[:-1]


def _cameras(observations: Any) -> dict[str, Any]:
    return {
        key: observations[key]
        for key in observations
        if key.endswith(CAMERAS) and len(getattr(observations[key], "shape", ())) == 4
    }


def _check_stored(stored: Any, count: int, filename: str, subject: str) -> None:
    if len(stored) != count:
        raise DataError(f"{subject} has {len(stored)} frames of {stored.name} and {count} rewards: each needs one.")
    if stored.is_virtual or stored.external or stored.file.filename != filename:
        raise DataError(f"{subject}: {stored.name} is in another file, which is not read: copy it in with h5repack.")
    # A set that was never written takes no space, and any shape.
    if stored.nbytes > EXPANDS * stored.id.get_storage_size():
        raise DataError(f"{subject}: {stored.name} claims {stored.nbytes:,} bytes that the file does not store.")


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ConfigError(f"reading {path} needs h5py: pip install h5py.") from error
    try:
        with h5py.File(path, "r") as file:
            yield file
    except DataError:
        raise
    except Exception as error:  # h5py raises whatever the library behind it says
        raise DataError(f"{path} cannot be read as HDF5 ({first_line(error)}): copy it again.") from error
