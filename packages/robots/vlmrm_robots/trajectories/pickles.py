"""Read pickled dictionaries of arrays and tensors without running anything in them.

A few names of numpy and torch stand for what is stored, and every other name is refused. A kilobyte can hold nested
containers that expand to 2^200 values, or a thousand references to one array, so values are counted, and the bytes of
arrays, as often as they occur.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.lib.stride_tricks import as_strided

from vlmrm.errors import DataError, first_line
from vlmrm.unpickling import PLAIN, PlainKeyUnpickler, load_torch

NUMBERS = ("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "b1")
OBJECTS = "O8"  # of the array of no axes in which np.save wraps a dictionary
MAX_VALUES = 1_000_000  # outside arrays, each counted as often as it occurs
REPEATS = 16  # times the bytes of a file: those of its arrays, each counted as often as it occurs


def read_dictionary(path: Path) -> dict[Any, Any]:
    """Read the dictionary in a `.npy` file: plain values, lists, tuples, dictionaries and arrays of numbers."""
    with _plain_errors(path, "np.save writes"), path.open("rb") as file:
        # Of NumPy's reader the header alone: np.load would run the pickle behind it.
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if shape != () or dtype.kind != "O":
            raise DataError(f"{path} holds an array of {dtype}, not a dictionary of images and labels.")
        reader = _ArrayUnpickler(file, path)
        return _dictionary(path, reader.plain(reader.load()))


def read_pickle(path: Path) -> tuple[dict[Any, Any], Callable[[Any], Any]]:
    """Read a pickled dictionary as it is stored, and the function that makes a value of it plain.

    What is never made plain may be of any kind, if only its names are those of arrays and tensors.
    """
    with _plain_errors(path, "pickle.dump writes"), path.open("rb") as file:
        reader = _ArrayUnpickler(file, path)
        stored = _dictionary(path, reader.load())

    def made_plain(value: Any) -> Any:
        with _plain_errors(path, "pickle.dump writes"):
            return reader.plain(value)

    return stored, made_plain


@contextmanager
def _plain_errors(path: Path, what: str) -> Generator[None]:
    try:
        yield
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} is refused: {first_line(error)}.") from error
    except Exception as error:  # a malicious file can raise anything
        raise DataError(f"{path} cannot be read ({first_line(error)[:200]}): it is not what {what}.") from error


def _dictionary(path: Path, stored: Any) -> dict[Any, Any]:
    if not isinstance(stored, dict):
        raise DataError(f"{path} holds no dictionary of images and labels, but {type(stored).__name__}.")
    return stored


class _Type:
    """A pickled numpy type."""

    def __init__(self, name: Any, *flags: object):
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def of_numbers(self) -> np.dtype[Any]:
        if self.name not in NUMBERS or self.order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it holds an array of something else than numbers")
        return np.dtype(self.order + self.name)


class _Array:
    """A pickled numpy array, whose content its state brings."""

    content: Any = None

    def __init__(self, *arguments: object):
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        if kind.name == OBJECTS:
            [self.content] = content
            return
        if not all(type(side) is int and side >= 0 for side in shape):
            raise pickle.UnpicklingError("it holds an array without a shape")
        dtype = kind.of_numbers()
        if type(content) is not bytes or len(content) != math.prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError("it holds an array whose shape is not that of its content")
        self.content = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _scalar(kind: _Type, content: bytes) -> Any:
    return np.frombuffer(content, kind.of_numbers(), count=1)[0].item()


def _tensor(storage: np.ndarray, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Any:
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *stride)):
        raise pickle.UnpicklingError("it holds a tensor without a shape")
    last = offset + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
    # Neither beyond its numbers, nor one of them repeated without end.
    if not offset <= last < len(storage) or math.prod(shape) > len(storage):
        raise pickle.UnpicklingError("it holds a tensor whose shape is not that of its content")
    return as_strided(storage[offset:], shape, [step * storage.itemsize for step in stride], writeable=False)


class _ArrayUnpickler(PlainKeyUnpickler):
    """Refuses every name but those of numpy's arrays and torch's tensors, and more bytes than a file may hold."""

    def __init__(self, file: BinaryIO, path: Path):
        super().__init__(file)
        self.bytes, self.values = REPEATS * path.stat().st_size, MAX_VALUES
        self.names = {
            **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
            **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
            ("numpy", "dtype"): _Type,
            ("numpy", "ndarray"): "ndarray",  # only passed to _reconstruct; a text cannot be called or changed
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch.storage", "_load_from_bytes"): self._storage,
            ("collections", "OrderedDict"): lambda: None,  # a tensor's hooks, of which there are none
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a dictionary of arrays does not need")
        return self.names[module, name]

    def _storage(self, content: bytes) -> np.ndarray:
        import torch

        self._spend(len(content))
        numbers = load_torch(BytesIO(content), len(content))
        return torch.tensor([], dtype=numbers.dtype).set_(numbers).numpy()

    def _spend(self, count: int) -> None:
        self.bytes -= count
        if self.bytes < 0:
            raise pickle.UnpicklingError(f"its arrays have more than {REPEATS} times as many bytes as it has")

    def plain(self, stored: Any) -> Any:
        """Return plain containers and arrays of what was read; UnpicklingError for more of them than are allowed."""
        self.values -= 1
        if self.values < 0:
            raise pickle.UnpicklingError(f"it holds more than {MAX_VALUES:,} values outside its arrays")
        if isinstance(stored, _Array):
            return self.plain(stored.content)
        if isinstance(stored, np.ndarray):
            self._spend(stored.nbytes)
            return stored
        if isinstance(stored, dict):
            return {key: self.plain(value) for key, value in stored.items()}
        if isinstance(stored, (list, tuple)):
            return type(stored)(map(self.plain, stored))
        if isinstance(stored, PLAIN):
            return stored
        raise pickle.UnpicklingError(
            f"it holds a {type(stored).__name__}, which is neither an array nor a plain value"
        )
