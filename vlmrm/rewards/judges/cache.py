"""Replies by their question's key: the last ones in memory, all of them in a folder where there is one."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from cachetools import LRUCache
from pydantic import ValidationError

from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, write_file
from vlmrm.rewards.judges.replies import Reply

logger = logging.getLogger("vlmrm")


class ReplyCache:
    """Any thread may use it. In the folder a reply is a file of JSON, whole or absent, which nothing ever removes.

    Args:
        size: replies in memory; the one that was not used for longest leaves first.
        folder: kept over runs, and shared by processes; left alone, with a warning, once its disk fails.

    Raises:
        ConfigError: when the folder cannot be made.
    """

    def __init__(self, size: int, folder: str | Path | None = None):
        self.folder = None if folder is None else Path(folder)
        self.replies: LRUCache[str, Reply] = LRUCache(size)
        self.lock = threading.Lock()
        if self.folder is not None:
            make_folder(self.folder, "cache_dir")

    def get(self, key: str) -> Reply | None:
        with self.lock:
            reply = self.replies.get(key)
        if reply is None and (reply := self._read(key)) is not None:
            self._remember(key, reply)
        return reply

    def put(self, key: str, reply: Reply) -> None:
        self._remember(key, reply)
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(exist_ok=True)
            write_file(path, reply.model_dump_json(), durable=False)
        except (OSError, ConfigError) as error:
            self._give_up(error)

    def _remember(self, key: str, reply: Reply) -> None:
        with self.lock, suppress(ValueError):  # where none is kept in memory
            self.replies[key] = reply

    def _read(self, key: str) -> Reply | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            return Reply.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (ValidationError, UnicodeDecodeError):
            logger.warning("%s is no reply of a judge; it is asked again and the file replaced", path)
        except OSError as error:
            self._give_up(error)
        return None

    def _give_up(self, error: Exception) -> None:
        logger.warning("cache_dir %s fails (%s); replies are kept in memory alone from now on", self.folder, error)
        self.folder = None

    def _path(self, key: str) -> Path | None:
        folder = self.folder  # another thread may give it up meanwhile
        return None if folder is None else folder / key[:2] / f"{key}.json"
