"""The body of an enqueue: JSON, a line end, and one tensor of all samples, as .npy or safetensors, never as a pickle.

image    uint8 [B, H, W, 3], or [B, 3, H, W] where W is not 3
video    uint8 [B, 3, T, H, W]
latent   float [B, C, T, H, W]; uint8 as .npy is bfloat16 byte by byte, [B, C, T, H, 2 W]
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    field_validator,
    model_validator,
)
from safetensors import SafetensorError, deserialize

from vlmrm.errors import MediaError
from vlmrm.serving.cost import decoded_size
from vlmrm.serving.media import read_npy
from vlmrm.serving.protocols.common import check_lengths
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import Column

KEPT_BYTES = 4096  # of a sample, as JSON, for as long as its result
MediaType = Literal["image", "video", "latent"]


def _frame_rate(info: dict[str, Any]) -> dict[str, Any]:
    """Read `video_fps`, as cosmos-rl's service does, or `fps`, as its documentation says."""
    rate = info.get("video_fps", info.get("fps"))
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1e6:
        raise ValueError("video_fps is missing or wrong: say how many frames a second the video has")
    return {**info, "video_fps": float(rate)}


class Metadata(BaseModel):
    """B prompts and the rewards of their samples; unknown keys go to the handlers of `engine` rewards.

    The weights of `reward_fn` are ignored: the client pulls every reward that it names, and multiplies.
    """

    model_config = ConfigDict(extra="allow")

    prompts: Column[str] = Field(min_length=1)
    reward_fn: dict[str, StrictInt | StrictFloat] = Field(min_length=1)
    media_type: MediaType = "latent"
    video_infos: Column[Annotated[dict[str, Any], AfterValidator(_frame_rate)]] | None = None
    geneval_tags: Column[str] | None = None
    geneval_includes: Column[Column[dict[str, Any]]] | None = None
    geneval_only_strict: bool = False

    @model_validator(mode="before")
    @classmethod
    def _rename_old_keys(cls, content: Any) -> Any:
        """Read the `prompt`, `tag` and `include` of older clients, which send GenEval one image."""
        if isinstance(content, dict) and "prompts" not in content and "prompt" in content:
            names = {"prompt": "prompts", "tag": "geneval_tags", "include": "geneval_includes"}
            return {names.get(key, key): [value] if key in names else value for key, value in content.items()}
        return content

    @field_validator("media_type", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_lengths(self) -> Metadata:
        check_lengths(
            self.prompts,
            "prompts",
            video_infos=None if self.media_type == "image" else self.video_infos,
            geneval_tags=self.geneval_tags,
            geneval_includes=self.geneval_includes,
        )
        if self.media_type != "image" and self.video_infos is None:
            raise ValueError("video_infos is missing: say the video_fps of each video")
        if (self.geneval_tags is None) != (self.geneval_includes is None):
            raise ValueError("geneval_tags and geneval_includes go together: send both")
        kept = len(json.dumps([self.video_infos, self.geneval_tags, self.geneval_includes]))
        if kept > KEPT_BYTES * len(self.prompts):
            raise ValueError(
                f"video_infos, geneval_tags and geneval_includes have {kept} bytes, over {KEPT_BYTES} for each of "
                f"{len(self.prompts)} samples: leave out what no reward reads"
            )
        return self


class Pull(BaseModel):
    """`type` may be left out where the request had one reward."""

    uuid: str = Field(min_length=1, max_length=64)
    type: str | None = None


@dataclass(frozen=True)
class MediaBatch:
    """The samples of a request: images [3, H, W], videos [T, 3, H, W] or latents [C, T, H, W].

    `info` is the `input_info` of the answer.
    """

    kind: MediaType
    samples: list[np.ndarray]
    info: dict[str, Any]

    @cached_property
    def columns(self) -> list[dict[str, dict[str, bytes]]]:
        """Return each sample as a column of an item, encoded once for all rewards."""
        name = "latents" if self.kind == "latent" else self.kind
        return [{name: {"npy": _write_npy(sample)}} for sample in self.samples]


def _write_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array))
    return file.getvalue()


def read_media(data: bytes, kind: MediaType, limits: Limits) -> MediaBatch:
    """Return the samples of a tensor."""
    values, dtype = _read_tensor(data)
    if min(values.shape, default=0) < 1:
        raise MediaError(f"a tensor of shape {list(values.shape)} has nothing in it")
    if len(values) > limits.max_items:
        raise MediaError(f"there are {len(values)} samples, over the limit of {limits.max_items}")
    if kind == "image":
        samples, (frames, height, width) = _images(values, dtype)
    elif kind == "video":
        samples, (frames, height, width) = _videos(values, dtype)
    else:
        values = _latents(values, dtype)
        frames, height, width = decoded_size(values.shape[1:])
        samples = values.astype(np.float32) if dtype == "float64" else values
        dtype = "bfloat16"  # to which cosmos-rl's service converts latents before it describes them
    limits.check_image(width, height)
    if len(samples) * frames * height * width > limits.max_total_pixels:
        raise MediaError(
            f"{len(samples)} samples of {frames} frames of {width}x{height} pixels are over the limit "
            f"max_total_pixels of {limits.max_total_pixels}: send fewer at a time"
        )
    if frames > limits.max_frames:
        raise MediaError(f"a video has {frames} frames, over the limit of {limits.max_frames}")
    bounds = (values.min(), values.max())
    low, high = map(_round_bfloat16, bounds) if dtype == "bfloat16" else map(float, bounds)
    info = {"shape": list(values.shape), "dtype": f"torch.{dtype}", "min": f"{low:.3f}", "max": f"{high:.3f}"}
    return MediaBatch(kind, list(samples), info)


SAFETENSORS = {"U8": "u1", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}


def _read_tensor(data: bytes) -> tuple[np.ndarray, str]:
    """Return the values, bfloat16 as float32, and torch's name of their type."""
    if data.startswith(b"\x93NUMPY"):
        values = read_npy(data)
        kind = values.dtype.newbyteorder("=")
        return values.astype(kind, copy=False), str(kind)
    if data[8:9] != b"{":  # of safetensors: the length of the header, then its JSON
        form = "as torch.save writes it, which is a pickle and refused" if data.startswith(b"PK") else "no tensor"
        raise MediaError(f"what follows the JSON is {form}: send numpy.save's .npy or safetensors")
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        raise MediaError(f"the safetensors cannot be read ({error})") from error
    if len(tensors) != 1:
        raise MediaError(f"the safetensors hold {len(tensors)} tensors: send one of all samples")
    [(_, tensor)] = tensors
    if tensor["dtype"] not in SAFETENSORS:
        raise MediaError(f"a tensor is {tensor['dtype']}: choose from {', '.join(SAFETENSORS)}")
    values = np.frombuffer(tensor["data"], SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])
    return (_widen(values), "bfloat16") if tensor["dtype"] == "BF16" else (values, str(values.dtype))


Size = tuple[int, int, int]  # frames, height and width of what a model sees


def _images(values: np.ndarray, dtype: str) -> tuple[np.ndarray, Size]:
    if dtype != "uint8" or values.ndim != 4 or 3 not in (values.shape[-1], values.shape[1]):
        raise MediaError(f"images are {dtype} {list(values.shape)}: send uint8 [B, H, W, 3]")
    images = values if values.shape[-1] != 3 else values.transpose(0, 3, 1, 2)
    return images, (1, *images.shape[2:])


def _videos(values: np.ndarray, dtype: str) -> tuple[np.ndarray, Size]:
    if dtype != "uint8" or values.ndim != 5 or values.shape[1] != 3:
        raise MediaError(f"videos are {dtype} {list(values.shape)}: send uint8 [B, 3, T, H, W]")
    return values.transpose(0, 2, 1, 3, 4), values.shape[2:]


def _latents(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return latents of a floating type, all finite."""
    if values.ndim == 5 and values.shape[1] == 3:
        raise MediaError("latents have 3 channels, as videos do: send media_type video, or image")
    if dtype == "uint8" and values.ndim == 5 and values.shape[-1] % 2 == 0:
        values, dtype = _widen(np.ascontiguousarray(values).view("<u2")), "bfloat16"
    if dtype not in ("float16", "bfloat16", "float32", "float64") or values.ndim != 5:
        raise MediaError(f"latents are {dtype} {list(values.shape)}: send float16 or float32 [B, C, T, H, W]")
    if not np.isfinite(values).all():
        raise MediaError("latents have values that are not finite")
    return values


def _widen(halves: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers, as uint16, in float32, of which they are the upper halves."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _round_bfloat16(value: Any) -> float:
    """Return the nearest bfloat16, ties to even."""
    [bits] = np.array([value], np.float32).view(np.uint32)
    return float(_widen(np.array([(int(bits) + 0x7FFF + (int(bits) >> 16 & 1)) >> 16], np.uint32))[0])
