"""Files that are at any moment absent, the old one, or whole."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, writing


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary file to write, which takes the place of `path` at the end.

    Raises:
        ConfigError: when it cannot be written; `path` is then as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def replace_file(path: Path, text: str) -> None:
    """Writes all of `text` or nothing.

    Raises:
        ConfigError: when it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def sole_writer(path: Path) -> Generator[None]:
    """Keep other processes from writing `path` for as long as this one is in the context, or alive.

    What says so is a lock of the operating system on a file beside it, which stays and means nothing by itself.

    Raises:
        ConfigError: when another process writes it, or the lock cannot be made.
    """
    make_folder(path.parent)
    lock = FileLock(path.with_name(path.name + ".lock"), blocking=False)
    with writing(path):
        try:
            lock.acquire()
        except Timeout as error:
            raise ConfigError(
                f"{path} is being written by another sweep: wait for its end, or choose another output_file."
            ) from error
    try:
        yield
    finally:
        lock.release()
