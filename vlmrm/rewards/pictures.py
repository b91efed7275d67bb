"""Pictures of samples: which a reward looks at, equal ones once; and as base64 for judges and reward servers."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Condition
from typing import Any, Literal

from cachetools import LRUCache, cached
from PIL import Image
from pydantic import Field

from vlmrm.data.media import media_key, open_image
from vlmrm.errors import RewardError
from vlmrm.settings import Strict

CACHED_CHARACTERS = 2**27
FRAMES = ("first", "mean")


class Encoding(Strict, frozen=True, strict=True):
    """How pictures are encoded: as Pillow writes the format unless told otherwise."""

    format: Literal["jpeg", "png"] = "png"
    quality: int = Field(75, ge=1, le=100)
    """Of a JPEG."""


def base64_of(image: Image.Image, encoding: Encoding | None = None) -> str:
    """Return the image as RGB in base64 of a file; without an encoding of a PNG that is written fast."""
    return _encoded(image, encoding)


def data_uri(image: Image.Image) -> str:
    """Return the image as an RGB PNG in a data URI."""
    return f"data:image/png;base64,{base64_of(image)}"


def _key(image: Image.Image, encoding: Encoding | None) -> tuple[str, Encoding | None]:
    return media_key(image), encoding


@cached(LRUCache(CACHED_CHARACTERS, getsizeof=len), key=_key, condition=Condition())
def _encoded(image: Image.Image, encoding: Encoding | None) -> str:
    file = io.BytesIO()
    rgb = image if image.mode == "RGB" else open_image(image)
    if encoding is None:  # higher levels take many times longer and are hardly smaller
        rgb.save(file, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    else:
        rgb.save(file, format=encoding.format, **({"quality": encoding.quality} if encoding.format == "jpeg" else {}))
    return base64.b64encode(file.getvalue()).decode("ascii")


def views_of(
    image: Sequence[Image.Image] | None, video: Sequence[Sequence[Image.Image]] | None, frames: str
) -> list[Sequence[Image.Image]]:
    """Return the images of each sample: its image, or the first frame or all frames of its video."""
    if image is not None and video is not None:
        raise RewardError("there are images and videos, and one of them is to be rewarded: give one.")
    if image is not None:
        return [[picture] for picture in image]
    if video is None:
        raise RewardError("there is neither an image nor a video to reward: give one.")
    return [clip[:1] if frames == "first" else clip for clip in video]


def once_each(
    keys: Iterable[Hashable], items: Sequence[Any], compute: Callable[[list[Any]], Iterable[Any]]
) -> list[Any]:
    """Return what `compute` makes of each item, and of equal ones once: they tie exactly."""
    keys = list(keys)
    distinct = dict(zip(keys, items, strict=True))
    by_key = dict(zip(distinct, compute(list(distinct.values())), strict=True))
    return [by_key[key] for key in keys]
