"""Connections under the limit of open files, which is raised; at the limit the longest idle one makes room."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable
from typing import Protocol

logger = logging.getLogger("vlmrm")

OPEN_FILES = 65_536  # that are asked for: far more than requests at a time, and few enough for libraries that try all
RESERVED = 64  # open files for all but connections: workers, Redis, fetched pictures
LOG_S = 10.0  # between two lines of the log about connections that were closed


class Connection(Protocol):
    """A connection, with when it was made or had its last answer; None while it waits for an answer."""

    @property
    def idle_since(self) -> float | None: ...

    def close(self) -> None: ...


def raise_open_files() -> None:
    """Raise this process's soft limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def spare_files() -> int:
    """Return how many open files are kept for all but connections."""
    return max(RESERVED, _open_files() // 8)


def max_connections() -> int:
    """Return how many connections may be open."""
    return max(_open_files() - spare_files(), 1)


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class Room:
    """Keeps the connections of a server below `max_connections`, and says in the log that it had to."""

    def __init__(self) -> None:
        self._closed = 0  # since the last line of the log
        self._logged = float("-inf")

    def make(self, connections: Iterable[Connection], count: int) -> None:
        """Close the one of `count` connections that is idle for longest, if there are too many.

        Without it the kernel would refuse all further ones, `/health` among them, and nobody would know.
        """
        if count <= (most := max_connections()):
            return
        idle = [(since, connection) for connection in connections if (since := connection.idle_since) is not None]
        if not idle:
            return
        min(idle, key=lambda pair: pair[0])[1].close()
        self._closed += 1
        if time.monotonic() - self._logged >= LOG_S:
            logger.warning(
                "%d idle connections were closed to make room for others: at most %d are kept, as this process may "
                "have %d open files. Raise that limit (ulimit -n, or LimitNOFILE of systemd).",
                self._closed,
                most,
                _open_files(),
            )
            self._closed, self._logged = 0, time.monotonic()
