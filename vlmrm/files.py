"""Files by their content, a SHA-256 of every byte, read once a process while the file stays as it is; and folders to
write to, where there can be none said in a sentence."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from vlmrm.errors import ConfigError

NO_LOCKS = "its file system has no locks"
# Hashing releases the GIL: more threads than this wait for the disk instead.
THREADS = 8


def content_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file in hexadecimal, some read at a time.

    Raises:
        OSError: when a file cannot be read.
    """
    files = list(paths)
    if not files:
        return {}
    with ThreadPoolExecutor(min(THREADS, len(files))) as threads:
        return dict(zip(files, threads.map(content_digest, files), strict=True))


def content_digest(path: Path) -> str:
    """Return the SHA-256 of one file in hexadecimal.

    Raises:
        OSError: when it cannot be read.
    """
    status = os.stat(path)
    return _digest(str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _digest(path: str, inode: int, size: int, changed_ns: int) -> str:
    """Read the file; what identifies its state on disk is part of the key, so that a changed file is read again."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder to write to.

    Raises:
        ConfigError: when there cannot be one.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Say in a sentence why `path` cannot be written or locked.

    Raises:
        ConfigError: which says it.
    """
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter is filelock's
        reason = (error.strerror or error) if isinstance(error, OSError) else NO_LOCKS
        raise ConfigError(f"{path} cannot be written ({reason}): make room, or choose another place.") from error
