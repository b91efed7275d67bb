"""Pictures painted over or degraded, each at its own size, and videos with their frames exchanged.

All are deterministic by the content of the picture, and raise `MediaError` where it cannot be read.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from PIL import Image

from vlmrm.conversation import Reference, Video, VideoOptions
from vlmrm.data.media import MIN_SIDE, image_size, open_image, video_frames

GREY = (128, 128, 128)
NOISE_SIDE = 336  # of the longer side: finer noise would average out to grey where images are resized
JPEG_QUALITY = 15
CROPPED = 0.07  # of each side
SMALLER = 0.7  # of each side: half of the pixels


def grey(reference: Reference) -> Image.Image:
    """Return a grey picture."""
    return Image.new("RGB", image_size(reference), GREY)


def noise(reference: Reference) -> Image.Image:
    """Return a picture of random colours, drawn by the content."""
    image = open_image(reference)
    rng = np.random.default_rng([*blake2b(image.tobytes(), digest_size=8).digest()])
    scale = min(1.0, NOISE_SIDE / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(image.size, Image.Resampling.NEAREST)


def compressed(reference: Reference) -> bytes:
    """Return the picture as a JPEG file of low quality."""
    file = io.BytesIO()
    open_image(reference).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def cropped(reference: Reference) -> Image.Image:
    """Return the picture without its margin, at its old size."""
    image = open_image(reference)
    width, height = image.size
    left, top = width * CROPPED / 2, height * CROPPED / 2
    return image.resize(image.size, Image.Resampling.BICUBIC, box=(left, top, width - left, height - top))


def smaller(reference: Reference) -> Image.Image:
    """Return the picture with half of its pixels, but no side below the least that models take."""
    image = open_image(reference)
    scale = max(SMALLER, MIN_SIDE / min(image.size))
    if scale >= 1:
        return image
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def shuffled(video: Video) -> Video:
    """Return the video with its frames in another order, drawn by their number."""
    frames, options = _frames(video)
    order = list(range(len(frames)))
    random.Random(len(order)).shuffle(order)
    return Video(tuple(frames[i] for i in order), options)


def painted(video: Video, paint: Callable[[Reference], Reference]) -> Video:
    """Return the video with each frame painted as a picture is."""
    frames, options = _frames(video)
    return Video(tuple(paint(frame) for frame in frames), options)


def _frames(video: Video) -> tuple[tuple[Reference, ...], VideoOptions]:
    video = video_frames(video)
    assert isinstance(video.reference, tuple)
    return video.reference, video.options
