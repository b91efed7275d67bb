"""A picture, an array and a film as requests hold them."""

from __future__ import annotations

import base64
import functools
import io
from typing import Any

import av
import numpy as np
from PIL import Image


@functools.cache
def png(width: int = 40, height: int = 30, colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@functools.cache
def clip() -> bytes:
    """A second of grey frames of 56x56."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 56
        for value in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((56, 56, 3), 20 * value, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
