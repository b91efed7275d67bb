"""Handlers: processes that parse what strangers send, check it and write answers; they hold no token."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import uvloop

from vlmrm.serving.frames import Frames, keep, start_process
from vlmrm.serving.front import Front
from vlmrm.serving.http_server import HttpRequest, listening
from vlmrm.serving.settings import ServiceSettings
from vlmrm.serving.telemetry import log_lines
from vlmrm.serving.worker.channel import Channel, die_with_parent

SendLink = Callable[[socket.socket], object]

logger = logging.getLogger("vlmrm")

LARGE_BYTES = 2**20  # of a body that only the last handler takes, so that small ones never wait behind it
ENDING_S = 2.0  # to end by itself before it is killed


class Handlers:
    """The processes of a front, kept running; `send_link` gets a socket to each, for the core."""

    def __init__(self, front: Front, requests: bool, send_link: SendLink):
        self._front, self._send_link = front, send_link
        settings = front.settings.model_dump(mode="json", exclude_defaults=True)  # with *** in place of secrets
        settings["clients"] = [{**one, "token": one["name"]} for one in settings.get("clients", ())]
        self._start = {"settings": settings, "requests": requests}
        count = front.settings.handlers
        self._processes: list[HandlerProcess | None] = [None] * count
        self._loops: list[asyncio.Task[None]] = []
        front.free = self.free

    async def start(self) -> None:
        runs = [partial(self._run, place) for place in range(len(self._processes))]
        self._loops = [asyncio.create_task(keep("a handler", run)) for run in runs]

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    def free(self, request: HttpRequest) -> HandlerProcess | None:
        """Return a process that is idle; None where there is none."""
        places = self._processes[-1:] if len(request.body) > LARGE_BYTES else self._processes
        return next((one for one in places if one is not None and one.working is None), None)

    async def _run(self, place: int) -> int:
        """Start a process, and have others take what it had once it ends."""
        process = self._processes[place] = await HandlerProcess.start(self._front, self._start, self._send_link)
        self._front.pump()
        try:
            return await asyncio.shield(process.ended)
        finally:
            self._processes[place] = None
            await process.stop()
            self._front.lost(process)


class HandlerProcess:
    """One process; it is `working` on a request until that waits for something else, or has its answer."""

    def __init__(self, front: Front, process: asyncio.subprocess.Process):
        self._front, self._process = front, process
        self._frames = Frames(self._receive)
        self._requests: dict[int, HttpRequest] = {}
        self._numbers: dict[HttpRequest, int] = {}
        self._number = 0
        self.working: int | None = None  # the number of the request
        self.ended = asyncio.ensure_future(process.wait())

    @staticmethod
    async def start(front: Front, start: dict[str, Any], send_link: SendLink) -> HandlerProcess:
        local, remote = socket.socketpair()
        core, link = socket.socketpair()
        with remote, core, link:
            process = await start_process("vlmrm.serving.handler", remote, link)
            send_link(core)
        handler = HandlerProcess(front, process)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: handler._frames, sock=local)
        handler._frames.send(start)
        return handler

    async def stop(self) -> None:
        self._frames.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), ENDING_S)
        if not self.ended.done():
            self._process.kill()
            await self.ended

    def ask(self, request: HttpRequest) -> None:
        number = self._number = self._number + 1
        self._requests[number] = request
        self._numbers[request] = number
        self.working = number
        self._frames.send(write_request(number, request))

    def cancel(self, request: HttpRequest) -> None:
        number = self._numbers.pop(request, None)
        if number is not None:
            self._frames.send({"cancel": number})
            self._end(number)

    def _receive(self, message: dict[str, Any]) -> None:
        if "answer" in message:
            number = message["answer"]
            request = self._requests.get(number)
            self._end(number)
            if request is not None:
                headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in message["headers"]]
                self._front.answered(request, message["status"], headers, message["body"], message["route"])
        else:
            self._release(message["release"])

    def _end(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            self._numbers.pop(request, None)
        self._release(number)

    def _release(self, number: int) -> None:
        if number == self.working:
            self.working = None
            self._front.pump()


def write_request(number: int, request: HttpRequest) -> dict[str, Any]:
    """Return a request as a handler gets it; the moments are of a clock that all processes share."""
    return {
        "request": number,
        "id": request.id,
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": b"\0".join(part for pair in request.headers for part in pair),
        "body": request.body,
        "client": asdict(request.client),
        "peer": request.connection.peer,
        "arrived": request.arrived,
        "deadline": None if request.deadline == math.inf else request.deadline,
    }


# The process of the front ------------------------------------------------------------------------------------------


async def run(control: socket.socket, listener: socket.socket, start: dict[str, Any]) -> None:
    """Serve at a socket that listens until the core closes `control`; requests that have come have their answers."""
    front = Front(ServiceSettings.model_validate(start["settings"]))
    log_lines(front.settings)
    handlers = Handlers(front, start["requests"], lambda link: socket.send_fds(control, [b"l"], [link.fileno()]))
    await handlers.start()
    async with listening(front, listener):
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(control, closed.set)
        await closed.wait()
        loop.remove_reader(control)
    await front.drain()
    await handlers.stop()


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    start = Channel(socket.dup(control.fileno())).receive()
    if start is not None:
        gc.freeze()  # what was imported is never looked at again
        uvloop.run(run(control, listener, start))
