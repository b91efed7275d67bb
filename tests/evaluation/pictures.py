"""Pictures without files."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Smooth blobs of colour, as different from each other as photos are."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 9, 3)).astype(np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
