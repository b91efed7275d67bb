"""Read pickled dictionaries of arrays and tensors without running anything in them.

A few names of numpy and torch stand for functions of our own, and every other name is refused.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from vlmrm.errors import DataError, first_line
from vlmrm.files import load_torch

NUMBERS = ("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "b1")
OBJECTS = "O8"  # of the array of no axes in which np.save wraps a dictionary
REPEATS = 16  # times the bytes of a file: those of its frames, each counted as often as it occurs


def read_dictionary(path: Path) -> dict[Any, Any]:
    """Read the dictionary that pickle.dump or np.save wrote, whose arrays and tensors are arrays of numbers."""
    writer = "np.save" if path.suffix == ".npy" else "pickle.dump"
    try:
        with path.open("rb") as file:
            if writer == "np.save":  # of NumPy's reader the header alone: np.load would run the pickle behind it
                version = npy.read_magic(file)
                read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read_header(file)
                if shape != () or dtype.kind != "O":
                    raise DataError(f"{path} holds an array of {dtype}, not a dictionary of images and labels.")
            stored = _ArrayUnpickler(file).load()
            stored = stored.item() if isinstance(stored, _Array) and stored.shape == () else stored
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} is refused: {first_line(error)}.") from error
    except Exception as error:  # a malicious file can raise anything
        said = first_line(error)[:200]
        raise DataError(f"{path} cannot be read ({said}): it is not what {writer} writes.") from error
    if not isinstance(stored, dict):
        raise DataError(f"{path} holds no dictionary of images and labels, but {type(stored).__name__}.")
    return stored


def check_repeats(path: Path, frames: list[Any]) -> None:
    """Refuse frames that take far more memory than the file: one may be named a thousand times."""
    if sum(frame.nbytes for frame in frames) > REPEATS * path.stat().st_size:
        raise DataError(f"{path} has images that claim more than {REPEATS} times the bytes of the file.")


class _Type:
    """A pickled numpy type, of which its state sets no more than the order of bytes."""

    def __init__(self, name: str, *flags: object):
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def of_numbers(self) -> np.dtype[Any]:
        if self.name not in NUMBERS or self.order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it holds an array of something else than numbers")
        return np.dtype(self.order + self.name)


class _Array(np.ndarray):
    """A pickled numpy array, whose type is made anew: NumPy would take a forged one for pointers."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        if any(side < 0 for side in shape):
            raise pickle.UnpicklingError("it holds an array without a shape")
        wrapper = kind.name == OBJECTS and shape == ()
        super().__setstate__((1, shape, np.dtype(object) if wrapper else kind.of_numbers(), fortran, content))


class _ArrayUnpickler(pickle._Unpickler):
    """Refuses every name but those of numpy's arrays and torch's tensors.

    It is the unpickler written in Python: that in C allocates memory for whatever sizes a file states.
    """

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self.names: dict[tuple[str, str], Any] = {  # nothing that a state could change for others
            **{(f"numpy.{core}.multiarray", "_reconstruct"): self.array for core in ("core", "_core")},
            **{(f"numpy.{core}.multiarray", "scalar"): self.scalar for core in ("core", "_core")},
            ("numpy", "dtype"): _Type,
            ("numpy", "ndarray"): "ndarray",  # only passed to _reconstruct
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch.storage", "_load_from_bytes"): self.storage,
            ("collections", "OrderedDict"): dict,  # a tensor's hooks, of which there are none
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a dictionary of arrays does not need")
        return self.names[module, name]

    def array(self, *_: object) -> np.ndarray:
        return _Array(0)

    def scalar(self, kind: _Type, content: bytes) -> Any:
        return np.frombuffer(content, kind.of_numbers(), count=1)[0].item()

    def storage(self, content: bytes) -> Any:
        return load_torch(BytesIO(content), len(content))

    def tensor(self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Any:
        import torch

        return torch.tensor([], dtype=storage.dtype).set_(storage, offset, shape, stride).numpy()
