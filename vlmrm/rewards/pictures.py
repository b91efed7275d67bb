"""Pictures as judges and reward servers are sent them: base64 of a file, encoded once for all of them."""

from __future__ import annotations

import base64
import io
import zlib
from threading import Condition
from typing import Literal

from cachetools import LRUCache, cached
from PIL import Image
from pydantic import Field

from vlmrm.data.media import media_key, open_image
from vlmrm.settings import Strict

CACHED_CHARACTERS = 2**27


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
