"""Images that look alike: a 64-bit hash of coarse structure, and a search for hashes that differ in few bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from PIL import Image
from scipy.fft import dctn

RADIUS = 4  # bits that may differ between images that look alike
SIDE = 8
SHRUNK = 32
NOISE_DIGITS = 3  # of the transform of 8-bit grey levels: without them, a flat image has no structure
CANDIDATES = 1 << 22  # compared at a time


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits: which of the 8x8 slowest waves of the grey image, shrunk to 32x32, are stronger than their median.

    None for an image of one grey, which has no structure to be alike in.
    """
    grey = np.asarray(image.convert("L").resize((SHRUNK, SHRUNK), Image.Resampling.LANCZOS), dtype=np.float64)
    waves = dctn(grey, norm="ortho")[:SIDE, :SIDE].round(NOISE_DIGITS)
    if not waves.flat[1:].any():
        return None
    return int.from_bytes(np.packbits(waves > np.median(waves)).tobytes(), "big")


def near_pairs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Places (i, j) where left[i] and right[j], uint64, differ in at most `RADIUS` bits: [P, 2], in order.

    The bits are cut into RADIUS + 1 bands. Two hashes that near agree in all bits of at least one band, so only those
    that do are compared.
    """
    bounds = np.linspace(0, 64, RADIUS + 2).round().astype(np.uint64)
    found = [np.zeros((0, 2), dtype=np.int64)]
    for low, high in pairwise(bounds):
        mask = np.uint64((1 << int(high - low)) - 1)
        found += _near_within(left, right, (left >> low) & mask, (right >> low) & mask)
    return np.unique(np.concatenate(found), axis=0)


def _near_within(
    left: np.ndarray, right: np.ndarray, left_band: np.ndarray, right_band: np.ndarray
) -> list[np.ndarray]:
    """The pairs of one band's buckets that are near, part by part."""
    order = np.argsort(right_band, kind="stable")
    sorted_band = right_band[order]
    first = np.searchsorted(sorted_band, left_band, side="left")
    counts = np.searchsorted(sorted_band, left_band, side="right") - first
    ends = np.cumsum(counts)
    parts, start = [], 0
    while start < len(left):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + CANDIDATES, side="right")), start + 1)
        own = counts[start:stop]
        i = np.repeat(np.arange(start, stop), own)
        within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        j = order[np.repeat(first[start:stop], own) + within]
        near = np.bitwise_count(left[i] ^ right[j]) <= RADIUS
        parts.append(np.stack([i[near], j[near]], axis=1))
        start = stop
    return parts
