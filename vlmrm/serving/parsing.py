"""Large JSON is parsed in processes of its own, which one request can neither stall nor fill for the others."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from anyio.to_thread import run_sync
from pydantic import BaseModel, ValidationError

from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.service import TooLarge
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import strict_json
from vlmrm.serving.threads import in_thread
from vlmrm.serving.worker.channel import pack, unpack
from vlmrm.serving.worker_process import SERVICE_VARIABLES
from vlmrm.settings import describe_errors

Model = TypeVar("Model", bound=BaseModel)

PROCESSES = 2
LARGE_BYTES = 256 * 2**10  # which the event loop parses in 5 ms at most, as it does
SYNTAX, MANY_SIGNS = (b",", b'"', b"[", b"{"), 20_000
ENTRIES = 1024  # of a column, which are validated in some milliseconds
LONG_TEXT = 4096  # characters, above which a text comes back beside the JSON, and is not parsed again
PARSE_S = 30.0
COPIES = 6  # of a body that a process may hold, as bytes, text, values, and the answer
BASE_BYTES = 2**30  # of addresses that Python and its libraries take
PIECE_BYTES = 2**20  # that are read at once
LENGTH = struct.Struct(">Q")


class Parsers:
    """Parses the JSON of requests within `limits`: small bodies here, large ones in up to `PROCESSES` processes."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._idle: list[_Process] = []
        self._free = asyncio.Semaphore(PROCESSES)

    async def parse(self, body: bytes) -> Any:
        """Return the value of a JSON text.

        Raises:
            InvalidRequest: as `strict_json`, and where a column has far more entries than a request may have items.
            TooLarge: when it takes too long, or too much memory.
        """
        value = await self._parsed(body)
        most = max(self._limits.max_items, ENTRIES)
        for name, column in value.items() if isinstance(value, dict) else ():
            if isinstance(column, list) and len(column) > most:
                raise InvalidRequest(f"{name[:60]} has {len(column)} entries: send {most} at most.")
        return value

    async def _parsed(self, body: bytes) -> Any:
        if len(body) < LARGE_BYTES and sum(map(body.count, SYNTAX)) < MANY_SIGNS:
            return strict_json(body, self._limits)
        async with self._free:
            process = self._idle.pop() if self._idle else _Process()
            try:
                # Where its client has gone, nobody waits for the thread, which ends with its process.
                answer = await run_sync(process.parse, body, self._limits, abandon_on_cancel=True)
            except OSError as error:  # it has ended, or was silent
                raise TooLarge(
                    f"the JSON of {len(body)} bytes took over {PARSE_S:g} s, or more memory than requests have: send "
                    "fewer items at a time."
                ) from error
            finally:
                if process.is_idle:
                    self._idle.append(process)
                else:
                    process.stop()
        if "error" in answer:
            raise InvalidRequest(answer["error"])
        return answer["value"]

    async def parse_as(self, kind: type[Model], body: bytes) -> Model:
        """Return a body as a model, for routes whose body FastAPI does not read; raises as `parse`."""
        value = await self.parse(body)
        try:
            return await in_thread(kind.model_validate, value)
        except ValidationError as error:
            raise InvalidRequest(f"{describe_errors(error.errors(), kind)}.") from None

    def stop(self) -> None:
        """End the processes that are idle; the others end with their requests."""
        while self._idle:
            self._idle.pop().stop()


class _Process:
    """A process that parses one text after another; `parse` is called in a thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._remote = socket.socketpair()
        self._socket.settimeout(PARSE_S)
        self.is_idle = True

    def parse(self, body: bytes, limits: Limits) -> dict[str, Any]:
        """Return `{"value"}` or `{"error"}`; raises OSError once the process is of no more use."""
        self.is_idle = False
        if self._process is None:
            self._start()
        allowed = limits.model_dump(include={"max_json_depth", "max_json_values", "max_text_bytes"})
        for part in (pack({"limits": allowed, "memory": COPIES * len(body) + BASE_BYTES}), body):
            self._socket.sendall(LENGTH.pack(len(part)))
            self._socket.sendall(part)
        answer = _texts(unpack(_receive(self._socket)))
        self.is_idle = True
        return answer

    def _start(self) -> None:
        with self._remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._remote.fileno())],
                pass_fds=[self._remote.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback would hold texts of the request
                env={name: value for name, value in os.environ.items() if name not in SERVICE_VARIABLES},
                start_new_session=True,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._remote.close()
        self._socket.close()


def _receive(channel: socket.socket) -> bytes:
    """Return the next part; raises ConnectionError once the other end is closed."""
    [size] = LENGTH.unpack(_read(channel, LENGTH.size))
    return _read(channel, size)


def _read(channel: socket.socket, size: int) -> bytes:
    data = io.BytesIO()
    while left := size - data.tell():
        if not (piece := channel.recv(min(left, PIECE_BYTES))):
            raise ConnectionError("the other end is closed")
        data.write(piece)
    return data.getvalue()


def _texts(value: Any) -> Any:
    """Return JSON with its long texts, which came as bytes, that JSON has none of."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {name: _texts(part) for name, part in value.items()}
    return list(map(_texts, value)) if isinstance(value, list) else value


# In the process ------------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Parse what comes over a socket until it is closed."""
    channel = socket.socket(fileno=descriptor)
    while True:
        try:
            given = unpack(_receive(channel))
        except ConnectionError:
            return
        body = _receive(channel)
        resource.setrlimit(resource.RLIMIT_AS, (given["memory"], resource.RLIM_INFINITY))  # over it the process ends
        answer = pack(_answer(body, given["limits"]))
        del body
        channel.sendall(LENGTH.pack(len(answer)))
        channel.sendall(answer)


def _answer(body: bytes, limits: Mapping[str, int]) -> dict[str, Any]:
    try:
        return {"value": _blobs(strict_json(body, Limits(**limits)))}
    except InvalidRequest as error:
        return {"error": str(error)}


def _blobs(value: Any) -> Any:
    """Return JSON with its long texts as bytes."""
    if isinstance(value, str):
        return value.encode() if len(value) > LONG_TEXT else value
    if isinstance(value, dict):
        return {name: _blobs(part) for name, part in value.items()}
    return list(map(_blobs, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main(int(sys.argv[1]))
