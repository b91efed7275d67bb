"""Pictures as PNG in data URIs: each encoded once, however many judges are shown it."""

from __future__ import annotations

import base64
import io
import zlib
from hashlib import sha256
from threading import Condition

from cachetools import LRUCache, cached
from PIL import Image

from vlmrm.data.media import open_image

MOST = 2**27  # characters of data URIs that are remembered


def data_uri(image: Image.Image) -> str:
    """Return the picture as RGB, every pixel as it is; a thread waits for one that another is encoding."""
    return _data_uri(image if image.mode == "RGB" else open_image(image))


def _pixels(image: Image.Image) -> tuple[tuple[int, int], bytes]:
    return image.size, sha256(image.tobytes()).digest()


@cached(LRUCache(MOST, getsizeof=len), key=_pixels, condition=Condition())
def _data_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    # Of what is without loss the fastest; higher levels take many times longer and are hardly smaller.
    image.save(file, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
