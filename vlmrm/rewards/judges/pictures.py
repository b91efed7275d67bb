"""Pictures as PNG in data URIs: each encoded once, however many judges are shown it."""

from __future__ import annotations

import base64
import io
import threading
import zlib
from collections import OrderedDict
from concurrent.futures import Future
from hashlib import sha256

from PIL import Image

from vlmrm.data.media import open_image

MOST = 2**27  # characters of data URIs that are remembered

_lock = threading.Lock()
_encoded: OrderedDict[tuple[tuple[int, int], bytes], Future[str]] = OrderedDict()
_characters = 0


def data_uri(image: Image.Image) -> str:
    """The picture as RGB, every pixel as it is. A thread that wants one that another is encoding waits for it."""
    global _characters
    if image.mode != "RGB":
        image = open_image(image)
    key = image.size, sha256(image.tobytes()).digest()
    with _lock:
        found = _encoded.get(key)
        if found is not None:
            _encoded.move_to_end(key)
        else:
            mine = _encoded[key] = Future()
    if found is not None:
        return found.result()
    try:
        uri = _encode(image)
    except BaseException as error:
        with _lock:
            del _encoded[key]
        mine.set_exception(error)
        raise
    mine.set_result(uri)
    with _lock:
        _characters += len(uri)
        while _characters > MOST and next(iter(_encoded.values())).done():
            _characters -= len(_encoded.popitem(last=False)[1].result())
    return uri


def _encode(image: Image.Image) -> str:
    file = io.BytesIO()
    # Of what is without loss the fastest; higher levels take many times longer and are hardly smaller.
    image.save(file, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
