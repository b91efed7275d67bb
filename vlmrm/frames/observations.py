"""What a vector of environments shows after a step: the frames of each, with the labels of their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from vlmrm.errors import ConfigError, DataError
from vlmrm.frames.pixels import to_uint8

LABELS = ("success", "success_frame", "is_success")  # where an environment says whether its state is a success
LabelledFrame = tuple[dict[str, np.ndarray], float]  # of one state: uint8 [C,H,W] by camera, and its label


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """How an environment starts the next episode.

    Raises:
        ConfigError: when it does not say.
    """
    try:
        return AutoresetMode(env.metadata["autoreset_mode"])
    except (KeyError, ValueError) as error:
        modes = ", ".join(mode.value for mode in AutoresetMode)
        raise ConfigError(
            f"{type(env.unwrapped).__name__} does not say how it starts a new episode, so its last frames cannot be "
            f"told: set metadata['autoreset_mode'] to one of {modes}."
        ) from error


def last_of_episode(i: int, info: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Observation and info of the last state of the episode that environment `i` has ended and followed by another.

    Raises:
        DataError: when the environment does not give them.
    """
    if "final_info" not in info:
        raise DataError(f"environment {i} ended an episode without final_info: its last frame is unknown.")
    return info["final_obs"][i] if "final_obs" in info else None, info["final_info"]


def own_observation(i: int, observation: Any) -> Any:
    """The part of a batched observation that is of environment `i`."""
    if isinstance(observation, Mapping):
        return {key: own_observation(i, value) for key, value in observation.items()}
    return observation[i]


def frames_of(i: int, key: str, observation: Any, info: Mapping[str, Any], count: int) -> np.ndarray:
    """What a camera of environment `i` of `count` shows, uint8 [k,C,H,W] of the k states of the step; a copy.

    `observation` is that environment's own; `info` is of all of them. Frames are looked up in info["images"],
    observation["images"] and the observation itself; they are [C,H,W], [H,W,C], or k of them.

    Raises:
        DataError: when there are none, or they are no frames.
    """
    found = value_of(i, key, info.get("images", {}), count)
    if found is None and isinstance(observation, Mapping):
        inside = observation.get("images", {})
        found = inside.get(key) if isinstance(inside, Mapping) else None
        found = observation.get(key) if found is None else found
    if found is None:
        raise DataError(f"environment {i} shows no image {key!r}: check image_keys, or have it put images into info.")
    frames = np.asarray(found)
    frames = frames[None] if frames.ndim == 3 else frames
    if frames.ndim == 4 and frames.shape[1] not in (1, 3) and frames.shape[-1] in (1, 3):
        frames = frames.transpose(0, 3, 1, 2)
    if frames.ndim != 4 or frames.shape[1] not in (1, 3):
        raise DataError(
            f"environment {i} shows {key!r} of shape {list(np.shape(found))}: images are [C,H,W] or [H,W,C]."
        )
    return np.array(to_uint8(frames, f"the images {key!r} of environment {i}"))  # it may draw into them again


def labelled_frames(
    i: int, keys: Sequence[str], observation: Any, info: Mapping[str, Any], count: int
) -> list[LabelledFrame]:
    """What environment `i` of `count` shows, one for each state of the step; none where it gives no label.

    Raises:
        DataError: when frames are missing (see `frames_of`), or there is not one label for each.
    """
    labels = _labels(i, info, count)
    if labels is None:
        return []
    images = {key: frames_of(i, key, observation, info, count) for key in keys}
    for key, frames in images.items():
        if len(frames) != len(labels):
            raise DataError(
                f"environment {i} showed {len(frames)} frames of {key!r} with {len(labels)} labels: each frame needs "
                "the label of the state that it shows."
            )
    return [({key: images[key][t] for key in keys}, float(labels[t])) for t in range(len(labels))]


def says_success_once(i: int, info: Mapping[str, Any], count: int) -> bool:
    """Whether `info` says that the episode of environment `i` has succeeded at some time."""
    values = (value_of(i, "success_once", place, count) for place in (info, info.get("episode", {})))
    return any(value is not None and bool(np.any(value)) for value in values)


def value_of(i: int, name: str, info: Mapping[str, Any], count: int) -> Any:
    """What `info` has for environment `i` under a name, None where it has nothing."""
    if name not in info:
        return None
    values, present = info[name], info.get(f"_{name}")
    if len(values) != count:
        raise DataError(
            f"info[{name!r}] has {len(values)} values for {count} environments: it cannot be said whose they are."
        )
    return values[i] if present is None or present[i] else None


def _labels(i: int, info: Mapping[str, Any], count: int) -> np.ndarray | None:
    for name in LABELS:
        value = value_of(i, name, info, count)
        if value is not None:
            labels = np.atleast_1d(np.asarray(value, dtype=np.float32))
            if labels.ndim != 1 or not ((labels >= 0) & (labels <= 1)).all():
                raise DataError(f"environment {i} says {name} {value}: it is true, false, or from 0 to 1.")
            return labels
    return None
