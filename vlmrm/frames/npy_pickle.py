"""Reads a dictionary of arrays that `np.save` pickled, without running anything that the pickle asks for.

NumPy would run the pickle. Here names are looked up nowhere: three of numpy's stand for records of what was stored,
every other name is refused, and arrays are made from the records' bytes. The unpickler is the one written in Python,
because the other takes memory for whatever numbers a file holds.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from vlmrm.errors import DataError

NUMBERS = {"f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "b1"}
MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


def read_dictionary(path: Path) -> dict[Any, Any]:
    """The dictionary in a `.npy` file: plain values, lists, tuples, dictionaries and arrays of numbers.

    Raises:
        DataError: when the file cannot be read, holds no dictionary, or anything but those.
    """
    try:
        with path.open("rb") as file:
            version = npy.read_magic(file)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read_header(file)
            if shape != () or dtype.kind != "O":
                raise DataError(f"{path} holds an array of {dtype}, not a dictionary of images and labels.")
            stored = _arrays(_Reader(file).load())
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} is refused: {error}.") from error
    except Exception as error:  # a file made to do harm can raise anything
        said = str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read ({said}): it is not what np.save writes.") from error
    if not isinstance(stored, dict):
        raise DataError(f"{path} holds no dictionary of images and labels, but {type(stored).__name__}.")
    return stored


class _Type:
    """A numpy type as it was stored."""

    def __init__(self, name: str, *flags: object):
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


class _Array:
    """An array as it was stored."""

    def __init__(self, kind: object, shape: object, code: object):
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def value(self) -> Any:
        _, shape, kind, fortran, content = self.state
        if isinstance(kind, _Type) and kind.name == "O8":
            if shape != () or len(content) != 1:
                raise pickle.UnpicklingError("it holds an array of objects")
            return _arrays(content[0])
        if not isinstance(kind, _Type) or kind.name not in NUMBERS or kind.order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it holds an array of something else than numbers")
        dtype = np.dtype(kind.order + kind.name)
        if not all(type(side) is int and side >= 0 for side in shape):
            raise pickle.UnpicklingError("it holds an array without a shape")
        if type(content) is not bytes or len(content) != math.prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError("it holds an array whose shape is not that of its content")
        return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


class _Reader(pickle._Unpickler):
    """Makes records, and refuses every name but those of numpy's arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if module in MODULES and name == "_reconstruct":
            return _Array
        if (module, name) == ("numpy", "dtype"):
            return _Type
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"  # only passed to _reconstruct; a text can be called and changed by nothing
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a dictionary of arrays does not need")


def _arrays(stored: Any) -> Any:
    """Plain containers with arrays in the place of records."""
    if isinstance(stored, _Array):
        return stored.value()
    if isinstance(stored, dict):
        return {_arrays(key): _arrays(value) for key, value in stored.items()}
    if isinstance(stored, (list, tuple)):
        return type(stored)(_arrays(value) for value in stored)
    if stored is None or isinstance(stored, (str, bytes, int, float, bool)):
        return stored
    raise pickle.UnpicklingError(f"it holds a {type(stored).__name__}, which is neither an array nor a plain value")
