"""A short name for the content of data sets, to tell in a result or checkpoint what it was made from."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from vlmrm.errors import DataError
from vlmrm.files import content_digests


def data_fingerprint(paths: Sequence[str]) -> str:
    """Return a hex digest over the names and every byte of the files behind `paths`; a hub id counts by its name.

    Images that a table names by their paths are other files: they count where `paths` holds their folder. Hidden files
    below a folder do not: caches, locks and what a desktop leaves there are no data.

    Raises:
        DataError: when a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for path in paths:
        try:
            contents = content_digests(_files(path))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{error.filename or path} cannot be read ({reason}): check its permissions.") from error
        for file, content in contents.items():
            digest.update(f"{file.name}\0{content}\0".encode())
        digest.update(b"" if Path(path).exists() else path.encode())
    return digest.hexdigest()


def _files(path: str) -> Iterator[Path]:
    """The files that `path` names: itself, those below a folder, those that a pattern matches."""
    here = Path(path)
    if here.is_dir():
        every = here.rglob("*")
        found = (file for file in every if not any(part.startswith(".") for part in file.relative_to(here).parts))
    elif here.is_file():
        found = iter([here])
    else:
        found = (Path(name) for name in glob.glob(path, recursive=True))
    yield from sorted(file for file in found if file.is_file())
