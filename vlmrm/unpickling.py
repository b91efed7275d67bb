"""Read pickles and what torch.save wrote without running code, within bounds that the file's own size sets.

torch.load with `weights_only` runs nothing, but two kilobytes may keep it busy for ever: it hashes the keys of
dictionaries, of which one may be a tuple that expands to 2^200 values, and it inflates archives that torch.save never
deflates. Both are refused before it reads.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any, BinaryIO, ClassVar
from zipfile import ZipFile

PLAIN = (str, bytes, int, float, bool, type(None))
OPCODES: dict[int, Callable[[Any], None]] = vars(pickle._Unpickler)["dispatch"]
LEGACY_PICKLES = 5  # of a file that is no archive: a magic number, a version, the machine, the content and its keys


def load_torch(stream: BinaryIO, size: int) -> Any:
    """Return the content of a file of `size` bytes: tensors on the CPU, numbers, texts and their containers."""
    if stream.read(2) == b"PK":
        _check_archive(stream, size)
    else:
        stream.seek(0)
        for _ in range(LEGACY_PICKLES):
            _KeyChecker(stream).load()
    import torch

    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _check_archive(stream: BinaryIO, size: int) -> None:
    with ZipFile(stream) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise pickle.UnpicklingError("it is compressed, or claims more bytes than it has")
        for name in archive.namelist():
            if name.endswith("data.pkl"):
                _KeyChecker(BytesIO(archive.read(name))).load()


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


class _Anything:
    """Stands for whatever a name makes, and takes what is put into it."""

    def __init__(self, *arguments: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass


class _Hashing(_Anything):
    """Stands for a dictionary or set: making one hashes the values that it is made of."""

    def __init__(self, *arguments: object):
        for value in (value for values in arguments if isinstance(values, (list, tuple)) for value in values):
            if isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in value):
                raise pickle.UnpicklingError("it makes a dictionary or a set of nested containers")


class _KeyChecker(PlainKeyUnpickler):
    """Makes nothing of a file's names, and raises where a dictionary or set of it would hash a container."""

    def find_class(self, module: str, name: str) -> Any:
        return _Hashing if name in ("OrderedDict", "Counter", "set") else _Anything

    def persistent_load(self, pid: object) -> _Anything:
        return _Anything()
