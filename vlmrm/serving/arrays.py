"""Arrays as the bytes of .npy files, from whoever sends them."""

from __future__ import annotations

import io
import math
from tokenize import TokenError

import numpy as np

from vlmrm.errors import MediaError

HEADER_CHARACTERS = 10_000
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def array_of(data: bytes) -> np.ndarray:
    """The array in a .npy file of numbers.

    numpy's own `load` opens zip files as well, and makes room for whatever size a header claims.

    Raises:
        MediaError: for what is no .npy file, holds anything but numbers, or is shorter or longer than its header says.
    """
    file = io.BytesIO(data)
    try:
        read_header = READERS[np.lib.format.read_magic(file)]
        shape, by_columns, kind = read_header(file, max_header_size=HEADER_CHARACTERS)
        if any(type(side) is not int for side in shape):  # to numpy, True is one
            raise ValueError(f"a shape of {shape}")
    except (KeyError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError, TokenError) as error:
        raise MediaError("an array is not a .npy file of version 1 or 2: save it by numpy.save") from error
    if kind.kind not in "biuf" or min(shape, default=0) < 0:
        raise MediaError(f"an array holds {kind}: save numbers")
    size, there = math.prod(shape) * kind.itemsize, len(data) - file.tell()
    if size != there:
        raise MediaError(f"an array of shape {list(shape)} takes {size} bytes, and {there} are there")
    flat = np.frombuffer(data, kind, offset=file.tell())
    return flat.reshape(shape, order="F" if by_columns else "C").copy()  # torch wants what it may write to
