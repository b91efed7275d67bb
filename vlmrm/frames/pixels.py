"""Frames as they are stored, uint8, and as a model takes them, in [0, 1]."""

from __future__ import annotations

import numpy as np

from vlmrm.errors import DataError


def to_uint8(frames: np.ndarray, what: str) -> np.ndarray:
    """Frames as they are stored: uint8 as it is, floats in [0, 1] times 255.

    Raises:
        DataError: when floats are outside [0, 1] or no numbers, or the type is another; `what` names the frames.
    """
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise DataError(f"{what} are {frames.dtype}: frames are uint8, or floats from 0 to 1.")
    outside = int((~((frames >= 0) & (frames <= 1))).sum())  # counts NaN too
    if outside:
        raise DataError(
            f"{what} have {outside} of {frames.size} values outside [0, 1], from {np.min(frames):g} to "
            f"{np.max(frames):g}: give uint8, or floats from 0 to 1."
        )
    return np.rint(frames * 255).astype(np.uint8)


def to_unit(frames: np.ndarray) -> np.ndarray:
    """Stored frames as a model takes them: uint8 into float32 in [0, 1], of the same shape."""
    return frames.astype(np.float32) / np.float32(255)
