"""Data of RLinf: `.npy` files of its document, and `.pkl` episodes and `.pt` payloads of its main branch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.errors import CheckpointError, DataError
from vlmrm.files import make_folder, require_new_file, require_new_folder, write_file
from vlmrm_robots.trajectories.pickles import check_repeats, read_dictionary
from vlmrm_robots.trajectories.trajectory import Trajectory, TrajectoryFile, listed, stored_as_bytes, to_unit

logger = logging.getLogger("vlmrm")

# Of an observation: [H,W,C] or [C,H,W], or several views of that.
CAMERAS = ("main_images", "wrist_images", "extra_view_images")
MAIN = CAMERAS[0]


def read_episode(path: Path) -> Trajectory:
    """Read an episode that RLinf's `CollectEpisode` pickled, running nothing in it; DataError for another content.

    A frame's label is `success` of its info, else `success_once` of the info's `episode`, as RLinf labels frames.
    """
    content = read_dictionary(path)
    observations, infos = content.get("observations"), content.get("infos")
    if not isinstance(observations, list) or not isinstance(infos, list) or not observations:
        raise DataError(f"{path} has no observations and infos, but {listed(map(str, content))}.")
    if len(observations) != len(infos):
        raise DataError(f"{path} has {len(observations)} observations and {len(infos)} infos: each frame needs both.")
    frames: list[dict[str, np.ndarray]] = []
    for number, observation in enumerate(observations):
        frames.append(_views(observation, f"{path}: observation {number}"))
        if frames[-1].keys() != frames[0].keys():
            raise DataError(
                f"{path}: observation {number} has {listed(frames[-1])}, and the first {listed(frames[0])}."
            )
    check_repeats(path, [view for views in frames for view in views.values()])
    images = {key: _stacked([views[key] for views in frames], f"{path}: {key}") for key in frames[0]}
    successes = [_stored_success(info) for info in infos]
    if all(success is None for success in successes):
        raise DataError(f"{path} has no success in its infos, nor success_once of their episode: frames need labels.")
    labels = np.array([_is_true(success, str(path)) for success in successes], dtype=np.float32)
    trajectory = stored_as_bytes(images, labels, str(path))
    trajectory.metadata["success_once"] = str(_is_true(content.get("success"), str(path))).lower()
    return trajectory


def _views(observation: Any, subject: str) -> dict[str, np.ndarray]:
    """Return the frames [C,H,W] of an observation by camera; several views are `extra_view_images-0` and so on."""
    if not isinstance(observation, dict) or observation.get(MAIN) is None:
        raise DataError(f"{subject} has no {MAIN}: collect with images.")
    views: dict[str, np.ndarray] = {}
    for camera in CAMERAS:
        frame = observation.get(camera)
        if frame is None:
            continue
        if not isinstance(frame, np.ndarray) or frame.ndim not in (3, 4):
            raise DataError(f"{subject} has {camera} that are no image.")
        if frame.ndim == 3 or len(frame) == 1:
            views[camera] = _channels_first(frame.reshape(frame.shape[-3:]))
        else:
            views |= {f"{camera}-{number}": _channels_first(view) for number, view in enumerate(frame)}
    return views


def _channels_first(frame: np.ndarray) -> np.ndarray:
    return frame.transpose(2, 0, 1) if frame.shape[-1] in (1, 3, 4) else frame


def _stored_success(info: Any) -> Any:
    """Return what an info stores of its frame's success; None if it does not say."""
    if not isinstance(info, dict):
        return None
    episode = info.get("episode")
    return info.get("success", episode.get("success_once") if isinstance(episode, dict) else None)


def _is_true(success: Any, subject: str) -> bool:
    try:
        return success is not None and bool(np.any(np.asarray(success, dtype=float)))
    except (TypeError, ValueError) as error:
        raise DataError(f"{subject} has a success that is neither true nor false: {str(success)[:40]!r}.") from error


def _stacked(frames: Sequence[np.ndarray], subject: str) -> np.ndarray:
    shapes = {frame.shape for frame in frames}
    if len(shapes) > 1:
        raise DataError(f"{subject} are of the sizes {listed(sorted(shapes))}: frames of one camera have one.")
    return np.stack(frames)


def read_payload(path: Path) -> Trajectory:
    """Read the frames that RLinf's preprocessing sampled out of many episodes, as one trajectory; warn of that."""
    import torch

    from vlmrm.weights import read_weight_file

    try:
        content = read_weight_file(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    images, labels = content.get("images"), content.get("labels")
    if not isinstance(images, list) or not isinstance(labels, list) or len(images) != len(labels) or not images:
        raise DataError(f"{path} has no images with a label each, but {listed(content)}.")
    if any(not isinstance(image, torch.Tensor) or image.layout != torch.strided or image.is_meta for image in images):
        raise DataError(f"{path} has images that are no tensors [C,H,W] or [H,W,C].")
    check_repeats(path, images)
    if any(image.dim() != 3 for image in images) or not all(type(label) in (int, float, bool) for label in labels):
        raise DataError(f"{path} has images that are no tensors [C,H,W] or [H,W,C], or labels that are no numbers.")
    logger.warning(
        "%s does not say which frames are of one episode, and is one trajectory: a classifier of such files never "
        "qualifies as a reward; import the .pkl episodes that they were sampled from.",
        path,
    )
    frames = _stacked([_channels_first(image.numpy()) for image in images], f"{path}: images")
    return stored_as_bytes({MAIN: frames}, np.array(labels, dtype=np.float32), str(path))


def write_document_files(files: Sequence[TrajectoryFile], folder: Path) -> list[Path]:
    """Write trajectories as RLinf's document has them: `positive` and `negative` folders of pickled float32 arrays."""
    require_new_folder(folder, "RLinf's files")
    written: dict[bool, list[Path]] = {True: [], False: []}
    for side in written:
        make_folder(folder / ("positive" if side else "negative"))
    for file in files:
        trajectory = Trajectory({}, file.labels, file.metadata)
        paths = written[trajectory.positive]
        name = f"{'positive' if trajectory.positive else 'negative'}/{len(paths):06d}.npy"
        content: Mapping[str, Any] = {
            "images": {key: to_unit(file.frames(key)) for key in file.keys},
            "labels": file.labels.astype(np.float32),
        }
        buffer = BytesIO()
        np.save(buffer, np.array(content, dtype=object), allow_pickle=True)
        write_file(folder / name, buffer.getvalue())
        paths.append(folder / name)
    return written[True] + written[False]


def write_payload(files: Sequence[TrajectoryFile], path: Path, key: str | None = None) -> int:
    """Write the frames of one camera as the `.pt` that RLinf's main branch trains on; return their number."""
    import torch

    require_new_file(path)
    key = key or files[0].keys[0]
    images = [torch.from_numpy(frame.copy()) for file in files for frame in file.frames(key)]
    labels = [int(success) for file in files for success in file.successes]
    buffer = BytesIO()
    torch.save({"images": images, "labels": labels, "metadata": {"camera": key, "episodes": len(files)}}, buffer)
    make_folder(path.parent)
    write_file(path, buffer.getvalue())
    return len(images)
