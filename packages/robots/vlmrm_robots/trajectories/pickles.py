"""Read pickled dictionaries of arrays and tensors without running anything in them.

A few names of numpy and torch stand for records of the stored values, every other name is refused, and arrays are made
from the records' bytes. A kilobyte can hold nested containers that expand to 2^200 values, or a thousand references to
one array, so values are counted, and the bytes of arrays, as often as they occur.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.lib import format as npy

from vlmrm.errors import DataError, first_line
from vlmrm.unpickling import PLAIN, PlainKeyUnpickler, load_torch

# Not a set: the name of a pickled type may be any object, and must not be hashed.
NUMBERS = ("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "b1")
MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
MAX_VALUES = 1_000_000  # outside arrays, each counted as often as it occurs
REPEATS = 16  # times the bytes of a file: those of its arrays, each counted as often as it occurs


@dataclass
class Budget:
    """What a file of some bytes may still hold."""

    bytes: int
    values: int

    @classmethod
    def of(cls, path: Path) -> Budget:
        return cls(REPEATS * path.stat().st_size, MAX_VALUES)

    def spend(self, count: int) -> None:
        """Take the bytes of an array; UnpicklingError if there are not as many."""
        self.bytes -= count
        if self.bytes < 0:
            raise pickle.UnpicklingError(f"its arrays have more than {REPEATS} times as many bytes as it has")


def read_dictionary(path: Path) -> dict[Any, Any]:
    """Read the dictionary in a `.npy` file: plain values, lists, tuples, dictionaries and arrays of numbers."""
    with _plain_errors(path, "np.save writes"), path.open("rb") as file:
        # Of NumPy's reader the header alone: np.load would run the pickle behind it.
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if shape != () or dtype.kind != "O":
            raise DataError(f"{path} holds an array of {dtype}, not a dictionary of images and labels.")
        return _dictionary(path, plain(_ArrayUnpickler(file).load(), Budget.of(path)))


def read_pickle(path: Path) -> tuple[dict[Any, Any], Callable[[Any], Any]]:
    """Read a pickled dictionary as it is stored, and the function that makes a value of it plain.

    What is never made plain may be of any kind, if only its names are those of arrays and tensors.
    """
    with _plain_errors(path, "pickle.dump writes"), path.open("rb") as file:
        stored = _dictionary(path, _ArrayUnpickler(file).load())
    budget = Budget.of(path)

    def made_plain(value: Any) -> Any:
        with _plain_errors(path, "pickle.dump writes"):
            return plain(value, budget)

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


def plain(stored: Any, budget: Budget) -> Any:
    """Return plain containers with arrays in place of records, which are taken from `budget`."""
    budget.values -= 1
    if budget.values < 0:
        raise pickle.UnpicklingError(f"it holds more than {MAX_VALUES:,} values outside its arrays")
    if isinstance(stored, _Record):
        return stored.value(budget)
    if isinstance(stored, dict):
        return {key: plain(value, budget) for key, value in stored.items()}
    if isinstance(stored, (list, tuple)):
        return type(stored)(plain(value, budget) for value in stored)
    if isinstance(stored, PLAIN):
        return stored
    raise pickle.UnpicklingError(f"it holds a {type(stored).__name__}, which is neither an array nor a plain value")


class _TypeRecord:
    """A pickled numpy type."""

    def __init__(self, name: str, *flags: object):
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    @staticmethod
    def of_numbers(kind: object) -> np.dtype[Any]:
        """Return the type that a record stands for, one of numbers."""
        if not isinstance(kind, _TypeRecord) or kind.name not in NUMBERS or kind.order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it holds an array of something else than numbers")
        return np.dtype(kind.order + kind.name)


class _Record:
    """What a pickle asks to be made of some arguments and a state."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def value(self, budget: Budget) -> Any:
        raise NotImplementedError


class _ArrayRecord(_Record):
    def value(self, budget: Budget) -> Any:
        _, shape, kind, fortran, content = self.state
        if isinstance(kind, _TypeRecord) and kind.name == "O8":  # np.save wraps a dictionary in an array of no axes
            if shape != () or len(content) != 1:
                raise pickle.UnpicklingError("it holds an array of objects")
            return plain(content[0], budget)
        dtype = _TypeRecord.of_numbers(kind)
        if not all(type(side) is int and side >= 0 for side in shape):
            raise pickle.UnpicklingError("it holds an array without a shape")
        if type(content) is not bytes or len(content) != math.prod(shape) * dtype.itemsize:
            raise pickle.UnpicklingError("it holds an array whose shape is not that of its content")
        budget.spend(len(content))
        return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


class _ScalarRecord(_Record):
    def value(self, budget: Budget) -> Any:
        kind, content = self.arguments
        return np.frombuffer(content, _TypeRecord.of_numbers(kind), count=1)[0].item()


class _StorageRecord(_Record):
    """The numbers of tensors, as torch.save writes them, which are read once."""

    numbers: Any = None

    def value(self, budget: Budget) -> Any:
        if self.numbers is None:
            [content] = self.arguments
            budget.spend(len(content))
            self.numbers = load_torch(BytesIO(content), len(content))
        return self.numbers


class _TensorRecord(_Record):
    """A torch tensor; its value is an array."""

    def value(self, budget: Budget) -> Any:
        import torch

        storage, offset, shape, stride, *_ = self.arguments
        if not isinstance(storage, _StorageRecord) or not all(type(n) is int and n >= 0 for n in (*shape, *stride)):
            raise pickle.UnpicklingError("it holds a tensor without numbers or a shape")
        numbers = torch.tensor([], dtype=(held := storage.value(budget)).dtype).set_(held)
        last = offset + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
        # Neither beyond its numbers, nor one of them repeated without end.
        if not 0 <= offset <= last < len(numbers) or math.prod(shape) > len(numbers):
            raise pickle.UnpicklingError("it holds a tensor whose shape is not that of its content")
        budget.spend(math.prod(shape) * numbers.element_size())
        return numbers.as_strided(shape, stride, offset).numpy()


def _no_hooks() -> None:
    """Stand for the empty OrderedDict of a tensor's hooks."""


class _ArrayUnpickler(PlainKeyUnpickler):
    """Makes records, and refuses every name but those of numpy's arrays and torch's tensors."""

    names: ClassVar[dict[tuple[str, str], Any]] = {
        **{(module, "_reconstruct"): _ArrayRecord for module in MODULES},
        **{(module, "scalar"): _ScalarRecord for module in MODULES},
        ("numpy", "dtype"): _TypeRecord,
        ("numpy", "ndarray"): "ndarray",  # only passed to _reconstruct; a text cannot be called or changed
        ("torch._utils", "_rebuild_tensor_v2"): _TensorRecord,
        ("torch.storage", "_load_from_bytes"): _StorageRecord,
        ("collections", "OrderedDict"): _no_hooks,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a dictionary of arrays does not need")
        return self.names[module, name]
