"""The images of an observation by camera, whatever names and layout an environment gives them, and their crops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from vlmrm.errors import DataError
from vlmrm_robots.frames.settings import Crop
from vlmrm_robots.trajectories.trajectory import listed, to_uint8

UNNAMED = ""  # the camera of an observation that has one image and no name for it


def cameras(observation: Any) -> dict[str, Any]:
    """Return the images of one environment's observation by camera.

    It is an image itself, or has some at `images` or `pixels` (one, or by camera), at ManiSkill's
    `sensor_data.CAMERA.rgb`, at LeRobot's `observation.images.CAMERA` or `observation.image`, or under their names.
    """
    if not isinstance(observation, Mapping):
        return {UNNAMED: observation} if _is_image(observation) else {}
    found: dict[str, Any] = {}
    for name, value in observation.items():
        if name in ("images", "pixels"):
            found |= value if isinstance(value, Mapping) else {UNNAMED: value}
        elif name == "sensor_data":
            found |= {camera: shown["rgb"] for camera, shown in value.items() if "rgb" in shown}
        elif name == "observation.image":
            found[UNNAMED] = value
        elif _is_image(value):
            found[name.removeprefix("observation.images.")] = value
    return found


def _is_image(value: Any) -> bool:
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) == 2:  # bytes, or it is a table of numbers
        return str(value.dtype).endswith("uint8")
    return len(shape) in (3, 4) and (shape[-3] in (1, 3) or shape[-1] in (1, 3, 4))


def images_of(
    i: int, keys: Sequence[str], observation: Any, info: Mapping[str, Any], count: int
) -> dict[str, np.ndarray]:
    """Return copies of the cameras' frames of environment `i`, uint8 [k,C,H,W] of the k states of a step.

    `observation` is that environment's own, `info` of all `count`; `info["images"]` comes before the observation. An
    image without a name is that of the only key.
    """
    images = info.get("images", {})
    if not isinstance(images, Mapping):
        images = {UNNAMED: images}
    names = [name for name in images if not (name.startswith("_") and name[1:] in images)]
    values = {name: value_of(i, name, images, count) for name in names}
    shown = cameras(observation) | {name: value for name, value in values.items() if value is not None}
    if len(keys) == 1 and UNNAMED in shown:
        shown.setdefault(keys[0], shown[UNNAMED])
    missing = [key for key in keys if key not in shown]
    if missing:
        parts = list(observation) if isinstance(observation, Mapping) else [f"numbers {list(np.shape(observation))}"]
        has = f"it shows {listed(name or 'one without a name' for name in shown)}"
        has = has if shown else f"its observation has {listed(parts)}, and info no images"
        raise DataError(f"environment {i} shows no image {missing[0]!r}: {has}; check image_keys.")
    # A copy: the environment may draw into them again.
    return {key: np.array(as_frames(shown[key], f"the images {key!r} of environment {i}")) for key in keys}


def value_of(i: int, name: str, info: Mapping[str, Any], count: int) -> Any:
    """Return `info[name]` of environment `i`; None if absent, also by Gymnasium's mask `_name`."""
    if name not in info:
        return None
    values, present = info[name], info.get(f"_{name}")
    if len(values) != count:
        raise DataError(f"info[{name!r}] has {len(values)} values for {count} environments: give one for each.")
    return values[i] if present is None or present[i] else None


def as_array(values: Any) -> np.ndarray:
    """Return an array of an array or of a tensor, which may be on a GPU."""
    return values.numpy(force=True) if hasattr(values, "detach") else np.asarray(values)


def as_frames(values: Any, subject: str) -> np.ndarray:
    """Return uint8 [k,C,H,W], with 1 or 3 channels, of one image or of k, bytes or floats in [0, 1].

    One image is [H,W] if it is grey, [C,H,W] or [H,W,C]; an opaque alpha is dropped.
    """
    frames = as_array(values)
    shape = list(frames.shape)
    frames = frames[None] if frames.ndim == 2 else frames
    frames = frames[None] if frames.ndim == 3 else frames
    last = frames.ndim == 4 and frames.shape[1] not in (1, 3) and frames.shape[-1] in (1, 3, 4)
    frames = frames.transpose(0, 3, 1, 2) if last else frames
    if frames.ndim != 4 or not (last or frames.shape[1] in (1, 3)):
        forms = "[H,W], [C,H,W] or [H,W,C] with 1 or 3 channels or an alpha"
        raise DataError(f"{subject} are of shape {shape}: they are {forms}; of a stack of frames show the last alone.")
    frames = to_uint8(frames, subject)
    if frames.shape[1] == 4:
        if (frames[:, 3] != 255).any():
            raise DataError(f"{subject} have a fourth channel that is no opaque alpha: show three.")
        frames = frames[:, :3]
    return frames


def fitted(frames: np.ndarray, size: Sequence[int] | None, crop: Sequence[float] | None, subject: str) -> np.ndarray:
    """Return frames [k,C,H,W] cut to a crop and scaled to a size [C,H,W], of which one channel is grey.

    A crop is [left, top, right, bottom], in pixels, or in shares of the frame if none is above 1.
    """
    if crop is not None:
        full = (frames.shape[3], frames.shape[2]) * 2
        scale = full if max(crop) <= 1 else (1, 1, 1, 1)
        left, top, right, bottom = (round(edge * factor) for edge, factor in zip(crop, scale, strict=True))
        if not (0 <= left < right <= full[0] and 0 <= top < bottom <= full[1]):
            raise DataError(f"the crop {list(crop)} is not within {subject}, {full[0]} wide and {full[1]} high.")
        frames = frames[:, :, top:bottom, left:right]
    if size is None or frames.shape[1:] == tuple(size):
        return np.ascontiguousarray(frames)
    channels, height, width = size
    pictures = [Image.fromarray(frame[0] if len(frame) == 1 else frame.transpose(1, 2, 0)) for frame in frames]
    mode = "L" if channels == 1 else "RGB"
    pictures = [picture.resize((width, height), Image.Resampling.BOX).convert(mode) for picture in pictures]
    return np.stack([np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1) for picture in pictures])


@dataclass
class Views:
    """The frames of some cameras, cut to a `crop` and scaled to a `size`; those of an episode are of one size."""

    keys: Sequence[str]
    size: Sequence[int] | None
    crop: Crop
    shown: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the size of each camera's, before

    def of(
        self, i: int, observation: Any, info: Mapping[str, Any], count: int = 1, states: int = 1, name: str = ""
    ) -> dict[str, np.ndarray]:
        """Return the frames of environment `i` by camera, one of each state of a step, as `images_of` finds them."""
        name, fit = name or f"environment {i}", {}
        for key, frames in images_of(i, self.keys, observation, info, count).items():
            if len(frames) != states:
                raise DataError(
                    f"{name} showed {len(frames)} frames of {key!r} for {states} states: show one of each."
                )
            first = self.shown.setdefault(key, frames.shape[1:])
            if frames.shape[1:] != first:
                sizes = f"{list(frames.shape[1:])} after {list(first)}"
                raise DataError(f"{name} shows {key!r} as {sizes}: an episode has frames of one size.")
            fit[key] = fitted(frames, self.size, self.crop.get(key), f"the images {key!r}")
        return fit
