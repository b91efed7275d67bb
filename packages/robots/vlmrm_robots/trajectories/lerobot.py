"""LeRobotDatasets in and out, by LeRobot's own library: episodes with cameras, tasks, rewards and success."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from vlmrm.errors import ConfigError, DataError, first_line
from vlmrm.files import make_folder, require_new_folder
from vlmrm_robots.trajectories.trajectory import SUCCESS, Episode, Trajectory, TrajectoryFile, listed, to_uint8

IMAGES = "observation.images."
COLUMNS = NEXT_SUCCESS, REWARD = "next.success", "next.reward"


def _library() -> Any:
    if find_spec("lerobot") is None:
        raise ConfigError(
            "LeRobotDatasets are read and written by lerobot: install it (pip install 'lerobot[dataset]'), vlmrm and "
            "vlmrm-robots in an environment of their own."
        )
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # ty: ignore[import-not-found]

    return LeRobotDataset


# Reading -------------------------------------------------------------------------------------------------------------


def episodes_of(source: str, label: str | None = None, last_frame: bool = False) -> list[Episode]:
    """Return the episodes of a LeRobotDataset: a folder, or a repository of the hub.

    Args:
        label: the column whose values in [0, 1] are the labels; default: `next.success`, else a `next.reward` of 0
            and 1. A frame's label is that of its own row.
        last_frame: the column says how an episode ends, in whichever rows: the last frame of a successful one is its
            only success.
    """
    library, folder = _library(), Path(source)
    try:
        opened = library("local", root=folder) if folder.is_dir() else library(source)
    except Exception as error:  # of files, parquet, JSON, video and the hub
        raise DataError(f"{source} cannot be opened as a LeRobotDataset ({first_line(error)}): check it.") from error
    if not opened.meta.camera_keys:
        raise DataError(f"{source} has no cameras, but {listed(opened.meta.features)}.")
    column = label or next((name for name in COLUMNS if name in opened.meta.features), None)
    if column is None or column not in opened.meta.features:
        raise DataError(
            f"{source} has no {column or ' or '.join(COLUMNS)}, but {listed(opened.meta.features)}: name a column."
        )
    return [
        Episode(
            f"episode {number}",
            partial(_digest, row, last_frame),
            partial(_read, opened, row, column, label, last_frame),
        )
        for number, row in enumerate(opened.meta.episodes)
    ]


def _digest(row: dict[str, Any], last_frame: bool) -> str:
    """Return a hash of what a dataset says of an episode, in which are statistics of all its columns."""
    return sha256((repr(sorted(row.items())) + "last frame" * last_frame).encode()).hexdigest()


def _read(opened: Any, row: dict[str, Any], column: str, label: str | None, last_frame: bool) -> Trajectory:
    subject = f"{opened.root}: {column}"
    cameras = {key: key.removeprefix(IMAGES).replace(".", "_") for key in opened.meta.camera_keys}
    images: dict[str, list[np.ndarray]] = {name: [] for name in cameras.values()}
    if len(images) < len(cameras):
        raise DataError(f"{opened.root} has cameras of one name, {listed(cameras)}: rename one.")
    labels, task = [], ""
    for i in range(row["dataset_from_index"], row["dataset_to_index"]):
        try:
            frame = opened[i]
        except Exception as error:  # of parquet, pictures and video
            raise DataError(f"{opened.root} cannot be read ({first_line(error)}): copy it again.") from error
        labels.append(float(frame[column]))
        task = str(frame["task"])
        for key, name in cameras.items():  # as bytes at once: LeRobot's floats take four times as much memory
            images[name].append(to_uint8(frame[key].numpy(), f"{opened.root}: {key}"))
    if not labels:
        raise DataError(f"{opened.root} has an episode without frames: leave it out.")
    if column == REWARD and label is None and not np.isin(labels, (0, 1)).all():
        raise DataError(f"{subject} has values other than 0 and 1: name it with --label to take it as it is.")
    if last_frame:
        labels = [0.0] * (len(labels) - 1) + [max(labels)]
    elif len(labels) > 1 and min(labels) >= SUCCESS and not column.startswith("next."):
        raise DataError(
            f"{subject} is a success in every row of an episode, as what says how it ended: give --last-frame, by "
            "which the last frame of a successful one is its only success, or name a column of frames with --label."
        )
    metadata = {"task": task, "fps": str(opened.meta.fps)}
    stacked = {name: np.stack(frames) for name, frames in images.items()}
    return Trajectory(stacked, np.array(labels, dtype=np.float32), metadata)


# Writing -------------------------------------------------------------------------------------------------------------


def write_dataset(
    files: Sequence[TrajectoryFile],
    folder: Path,
    fps: int | None = None,
    task: str | None = None,
    progress: Path | None = None,
) -> int:
    """Write trajectories as a LeRobotDataset of exact pictures, and return the number of its frames.

    `next.success` says of each row whether its own frame succeeds, `next.reward` is its label, and `progress` what a
    model said in the file of `vlmrm frames progress`, else the share of the way to the first success, or 0;
    `sarm_progress.parquet` has it for LeRobot's weights of samples (RA-BC).
    """
    library = _library()
    fps = _frames_a_second(files) if fps is None else fps
    if fps < 1:
        raise ConfigError(f"fps is {fps}: a LeRobotDataset has at least one frame a second.")
    require_new_folder(folder, "the LeRobotDataset")
    make_folder(folder.parent)
    shapes = files[0].shapes
    for file in files:
        if file.shapes != shapes:
            raise DataError(f"{file.path} has {file.shapes}, and {files[0].path} {shapes}: export equal ones.")
    reached = {file.path: _progress(file) for file in files} if progress is None else _said_progress(progress, files)
    features: dict[str, Any] = {
        IMAGES + key: {"dtype": "image", "shape": (height, width, 3), "names": ["height", "width", "channels"]}
        for key, (_, height, width) in shapes.items()
    }
    scalars = ((REWARD, "float32"), (NEXT_SUCCESS, "bool"), ("progress", "float32"))
    features |= {name: {"dtype": kind, "shape": (1,), "names": None} for name, kind in scalars}
    partial_folder = folder.with_name(f".{uuid4().hex}.tmp")  # the library leaves half a set where it fails
    try:
        dataset = library.create("local", fps=fps, features=features, root=partial_folder, use_videos=False)
        for file in files:
            said = task or file.metadata.get("task") or file.metadata.get("environment") or "the task"
            images, share = {key: file.frames(key) for key in file.keys}, reached[file.path]
            for i, success in enumerate(file.successes):
                row: dict[str, Any] = {IMAGES + key: _rgb(frames[i]) for key, frames in images.items()}
                row |= {REWARD: file.labels[i : i + 1], NEXT_SUCCESS: np.array([success]), "task": said}
                dataset.add_frame(row | {"progress": share[i : i + 1]})
            dataset.save_episode()
        dataset.finalize()
        _write_sarm(files, reached, partial_folder / "sarm_progress.parquet")
        if folder.exists():
            folder.rmdir()
        partial_folder.rename(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} was not written, because LeRobot refuses it ({first_line(error)}).") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return sum(map(len, files))


def _frames_a_second(files: Sequence[TrajectoryFile]) -> int:
    rates = {file.metadata.get("fps", "10"): file.path for file in files}
    [rate, *others] = rates
    if others or not rate.isdecimal():
        raise DataError(
            f"trajectories such as {listed(rates.values())} are of {listed(rates)} frames a second: give fps."
        )
    return int(rate)


def _write_sarm(files: Sequence[TrajectoryFile], progress: Mapping[Path, np.ndarray], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {
        "index": np.arange(sum(map(len, files))),
        "episode_index": np.repeat(np.arange(len(files)), [len(file) for file in files]),
        "frame_index": np.concatenate([np.arange(len(file)) for file in files]),
        "progress_sparse": np.concatenate([progress[file.path] for file in files]),
    }
    parquet.write_table(pyarrow.table(columns), path)


def _said_progress(path: Path, files: Sequence[TrajectoryFile]) -> dict[Path, np.ndarray]:
    """Return what a file of `vlmrm frames progress` says of each frame, float32 [T], straight between its steps."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        said = {line["episode"]: np.array([line["steps"], line["scores"]], dtype=np.float64) for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of `vlmrm frames progress` ({first_line(error)}): write one.") from error
    if unsaid := [file.path for file in files if str(file.path) not in said]:
        raise DataError(f"{path} says nothing of {listed(unsaid)}: score the same folders, by the same paths.")
    if beyond := [name for name, (_, scores) in said.items() if not ((scores >= 0) & (scores <= 1)).all()]:
        raise DataError(f"{path} has scores outside of [0, 1] for {listed(beyond)}: score with an output of progress.")
    every = {file.path: (np.arange(len(file)), *said[str(file.path)]) for file in files}
    return {name: np.interp(*known).astype(np.float32) for name, known in every.items()}


def _progress(file: TrajectoryFile) -> np.ndarray:
    """Return the share of the way to the first success at each frame, float32 [T]."""
    if not file.successes.any():
        return np.zeros(len(file), dtype=np.float32)
    reached = max(len(file.way) - 1, 1)
    return np.minimum(np.arange(len(file), dtype=np.float32) / reached, np.float32(1))


def _rgb(frame: np.ndarray) -> np.ndarray:
    """Return a frame [H,W,3]; a grey one three times, since LeRobot knows no other pictures."""
    return np.ascontiguousarray(np.broadcast_to(frame, (3, *frame.shape[1:])).transpose(1, 2, 0))
