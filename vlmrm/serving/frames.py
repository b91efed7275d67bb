"""Messages between the processes of the service, over sockets that only they have: packed, without pickle."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

from vlmrm.formats.wire import read_outcome, write_outcome
from vlmrm.serving.backend import Job, State, Status
from vlmrm.serving.worker.channel import LENGTHS, pack, unpack

logger = logging.getLogger("vlmrm")


class Frames(asyncio.Protocol):
    """A socket of packed messages, each of which is given to `receive`; `lost` is done at its end."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]):
        self.receive, self._data, self._needed = receive, bytearray(), LENGTHS.size
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by their class

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        begin = 0
        while len(self._data) - begin >= self._needed:
            if self._needed == LENGTHS.size:
                self._needed += sum(LENGTHS.unpack_from(self._data, begin))
                continue
            end = begin + self._needed
            message = unpack(memoryview(self._data)[begin:end])
            begin, self._needed = end, LENGTHS.size
            self.receive(message)
        if begin:
            self._data = self._data[begin:]

    def send(self, message: dict[str, Any]) -> None:
        self._transport.write(pack(message))

    def close(self) -> None:
        self._transport.close()


# Of a job.
SENT = (
    *("reward", "packed", "count", "cost", "prefixes", "priority", "client", "weight", "request_id"),
    *("trace", "wanted", "slow"),
)


def write_job(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in SENT} | {"key": job.key}


def read_job(content: dict[str, Any]) -> Job:
    """Return a job with the digest of its content, which a handler has computed."""
    key = content.pop("key")
    job = Job(**content)
    job.key = key
    return job


def write_status(status: Status) -> dict[str, Any]:
    outcomes = None if status.outcomes is None else list(map(write_outcome, status.outcomes))
    return {**vars(status), "state": status.state.value, "outcomes": outcomes}


def read_status(content: dict[str, Any]) -> Status:
    outcomes = None if content["outcomes"] is None else list(map(read_outcome, content["outcomes"]))
    content = {**content, "state": State(content["state"]), "outcomes": outcomes}
    return Status(**content)


# Processes -----------------------------------------------------------------------------------------------------------

PAUSE_S = 0.5  # before another process is started


async def start_process(module: str, *ends: socket.socket) -> asyncio.subprocess.Process:
    """Start a module as a process of the service, with these sockets."""
    numbers = [end.fileno() for end in ends]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, numbers)),
        pass_fds=numbers,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the core's to handle
    )


async def keep(what: str, run: Callable[[], Awaitable[int | None]]) -> NoReturn:
    """Run a process until it ends, which `run` returns the status of, and then another."""
    while True:
        try:
            logger.error("%s ended (%s): another is started", what, await run())
        except OSError as error:
            logger.error("%s cannot be started (%s): it is tried again", what, error.strerror)
        await asyncio.sleep(PAUSE_S)
