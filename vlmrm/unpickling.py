"""Read pickles and what torch.save wrote without running code in them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar
from zipfile import ZipFile

PLAIN = (str, bytes, int, float, bool, type(None))
OPCODES: dict[int, Callable[[Any], None]] = vars(pickle._Unpickler)["dispatch"]


def load_torch(stream: BinaryIO, size: int) -> Any:
    """Return the content of a file of `size` bytes: tensors on the CPU, numbers, texts and their containers."""
    if stream.read(2) == b"PK":
        with ZipFile(stream) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise pickle.UnpicklingError("it is compressed, or claims more bytes than it has")
    import torch

    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _with_plain_keys(opcode: bytes, keys: slice) -> Callable[[Any], None]:
    """Return an opcode that changes a dictionary once its keys, this slice of the stack, are known to be plain."""

    def load(reader: Any) -> None:
        for key in reader.stack[keys]:
            if not isinstance(key, PLAIN):
                raise pickle.UnpicklingError(f"it holds a {type(key).__name__} as a key")
        OPCODES[opcode[0]](reader)

    return load


def _refuse_set(reader: Any) -> None:
    raise pickle.UnpicklingError("it holds a set, which is neither an array nor a plain value")


class PlainKeyUnpickler(pickle._Unpickler):
    """Hashes nothing but plain keys: containers are neither keys nor in sets. Subclasses say what names stand for.

    It is the unpickler written in Python: that in C allocates memory for whatever sizes a file states.
    """

    dispatch: ClassVar = {
        **OPCODES,
        pickle.SETITEM[0]: _with_plain_keys(pickle.SETITEM, slice(-2, -1)),
        pickle.SETITEMS[0]: _with_plain_keys(pickle.SETITEMS, slice(None, None, 2)),
        pickle.DICT[0]: _with_plain_keys(pickle.DICT, slice(None, None, 2)),
        pickle.ADDITEMS[0]: _refuse_set,
        pickle.FROZENSET[0]: _refuse_set,
    }
