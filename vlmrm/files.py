"""Files: content digests, atomic writes and locks between processes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import warnings
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4
from zipfile import ZipFile

from filelock import FileLock, SoftFileLock, Timeout

from vlmrm.errors import ConfigError

logger = logging.getLogger("vlmrm")

# Hashing releases the GIL: more threads than this wait for the disk instead.
THREADS = 8

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of errors that more space mends


# Reading -------------------------------------------------------------------------------------------------------------


def content_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file in hexadecimal, reading several at a time."""
    files = list(paths)
    if not files:
        return {}
    with ThreadPoolExecutor(min(THREADS, len(files))) as threads:
        return dict(zip(files, threads.map(content_digest, files), strict=True))


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, from a cache while the file is unchanged."""
    status = os.stat(path)
    return _digest(str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=1 << 16)
def _digest(path: str, inode: int, size: int, *changed_ns: int) -> str:
    # The state of the file on disk is part of the cache's key, so that a changed file is read again.
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def size_text(count: float) -> str:
    """Return a number of bytes with its unit, in three digits: `1.21 MB`."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def visible_files(folder: Path) -> list[Path]:
    """Return the files below a folder in order, but for hidden ones (caches, locks) and those of hidden folders."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


# Writing -------------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path, *, durable: bool = True, exclusive: bool = False) -> Generator[Path]:
    """Yield a temporary file to write; at the end it replaces `path`, so readers see the old file or the new one.

    Any number of processes may do so at once. A killed process leaves a file `.*.tmp`; it is safe to delete. What is
    `durable` survives a crash of the machine; caches do without, and rebuild broken files. With `exclusive` a `path`
    that exists is kept, even one that another process creates meanwhile.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with plain_write_errors(path):
            yield temporary
            if durable:
                fsync(temporary)
            with suppress(FileExistsError):
                (os.link if exclusive else os.replace)(temporary, path)
            if durable:
                fsync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_file(path: Path, content: str | bytes, *, durable: bool = True, exclusive: bool = False) -> None:
    """Write `content` (a str as UTF-8) atomically; arguments and errors are those of `atomic_write`."""
    with atomic_write(path, durable=durable, exclusive=exclusive) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Any, *, durable: bool = True, exclusive: bool = False) -> None:
    """Write indented JSON atomically; arguments and errors are those of `atomic_write`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_file(path, text, durable=durable, exclusive=exclusive)


@contextmanager
def exclusive_lock(lock: Path, refusal: str, *, wait: float = 0.0) -> Generator[None]:
    """Hold the file `lock` exclusively among processes, until the context ends or the process dies.

    The operating system holds the lock; the file itself stays and means nothing. A file system without locks is
    warned of, and used without one. If another process holds it after `wait` seconds, `refusal` is the error.
    """
    make_folder(lock.parent)
    held: Any = FileLock(lock, timeout=wait)
    with plain_write_errors(lock), warnings.catch_warnings(action="ignore"):
        try:
            held.acquire()
        except (Timeout, NotImplementedError) as error:
            if isinstance(error, Timeout) and not isinstance(held, SoftFileLock):
                raise ConfigError(refusal) from None
        # filelock may have fallen back to a lock by a file's existence: a killed process would leave it locked.
        if isinstance(held, SoftFileLock) or not held.is_locked:
            held.release()
            lock.touch()
            logger.warning("%s has no file locks: nothing stops another process from writing there", lock.parent)
    try:
        yield
    finally:
        held.release()


def require_new_folder(folder: Path, purpose: str) -> None:
    """Refuse an output folder that exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name a new folder for {purpose}.")


def require_new_file(file: Path) -> None:
    """Refuse an output file that exists."""
    if file.exists():
        raise ConfigError(f"{file} exists already and is not overwritten: name another output, or remove it.")


def require_own_file(file: Path, *marks: str) -> None:
    """Refuse to replace a text file without one of `marks`: a command knows its own files by these texts."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else None
    if text is not None and not any(mark in text for mark in marks):
        raise ConfigError(f"{file} was not written by this command and is not overwritten: move it, or name another.")


def make_folder(folder: Path, key: str | None = None) -> None:
    """Create a folder to write to, the value of the setting `key`."""
    with plain_write_errors(folder, key):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")


@contextmanager
def plain_write_errors(path: Path, key: str | None = None) -> Generator[None]:
    """Turn an OSError about `path`, the value of the setting `key`, into one sentence."""
    try:
        yield
    except OSError as error:
        name, reason = f"{key} {path}" if key else path, error.strerror or error
        raise ConfigError(f"{name} cannot be written ({reason}): {_way_out(error, path)}.") from error


def _way_out(error: OSError, path: Path) -> str:
    if error.errno in FULL:
        return "free some space, or choose another path"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return "choose a path where you may write"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        file = next((above for above in (path, *path.parents) if above.is_file()), path)
        return f"{file} is a file where a folder is needed, choose another path"
    if isinstance(error, IsADirectoryError):
        return "it is a folder, name a file"
    return "choose another path"


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_wording(path: str | Path, where: str, *placeholders: str) -> str:
    """Return the text of a file that has each of the `placeholders` once: wording that vlmrm does not contain."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read ({error}): check it.") from error
    for placeholder in placeholders:
        if text.count(placeholder) != 1:
            raise ConfigError(f"{where} has {placeholder} {text.count(placeholder)} times: write it once.")
    return text


def load_torch(stream: BinaryIO, size: int) -> Any:
    """Return the content of a file of `size` bytes: tensors on the CPU, numbers, texts and their containers."""
    if stream.read(2) == b"PK":
        with ZipFile(stream) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise pickle.UnpicklingError("it is compressed, or claims more bytes than it has")
    import torch

    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)
