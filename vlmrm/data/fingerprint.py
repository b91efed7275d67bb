"""A short name for the content of data sets, to tell in a result or checkpoint what it was made from."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

ENDS = 1 << 20  # bytes read at either end of a file: whole tables of embedded images would take minutes


def data_fingerprint(paths: Sequence[str]) -> str:
    """Hex digest over the names, sizes and ends of the files behind `paths`; a hub id counts by its name."""
    digest = blake2b(digest_size=16)
    for path in paths:
        for file in _files(path):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as stream:
                digest.update(stream.read(ENDS))
                stream.seek(max(file.stat().st_size - ENDS, 0))
                digest.update(stream.read(ENDS))
        digest.update(b"" if Path(path).exists() else path.encode())
    return digest.hexdigest()


def _files(path: str) -> Iterator[Path]:
    """The files that `path` names: itself, those below a folder, those that a pattern matches."""
    here = Path(path)
    if here.is_dir():
        found = here.rglob("*")
    elif here.is_file():
        found = iter([here])
    else:
        found = (Path(name) for name in glob.glob(path, recursive=True))
    yield from sorted(file for file in found if file.is_file())
