"""The other processes of the service, which the core keeps running: the front, and the handlers, whom it answers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from pydantic import SecretStr

from vlmrm.serving.backend import Status
from vlmrm.serving.links import Link, read_job, write_status
from vlmrm.serving.service import Service

logger = logging.getLogger("vlmrm")

STATE_S = 0.1  # between two looks whether handlers have to learn something
ENDING_S = 15.0  # for the front to hand out its last answers
PAUSE_S = 0.5  # before another process is started
ASKED = ("score", "put", "wait", "cancel", "save_record", "load_record", "describe", "measure", "operate")


class HandlerLink(Link):
    """A socket to a handler: it is told the state of the core, whose methods it calls."""

    def __init__(self, service: Service, links: set[HandlerLink]):
        super().__init__(self._call)
        self._service, self._links = service, links

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._links.add(self)
        self.tell({"state": asdict(self._service.state)})

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._links.discard(self)

    async def _call(self, message: dict[str, Any]) -> Any:
        name, arguments = message["name"], message["arguments"]
        assert name in ASKED
        if name in ("score", "put"):
            arguments[0] = read_job(arguments[0])
        result = await getattr(self._service, name)(*arguments)
        if name == "score":
            return [result[0], write_status(result[1])]
        return write_status(result) if isinstance(result, Status) else result


class Processes:
    """The front, and the handlers, each with a socket to it and one to the core; a process that ends is replaced."""

    def __init__(self, service: Service, listener: socket.socket, requests: bool):
        self._service, self._listener = service, listener
        self._start = {"settings": _revealed(service.settings)}
        shown = service.settings.model_dump(mode="json", exclude_defaults=True)  # with *** in place of secrets
        shown["clients"] = [{**one, "token": one["name"]} for one in shown.get("clients", ())]
        self._start_of_handlers = {"settings": shown, "requests": requests}
        self._links: set[HandlerLink] = set()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        runs = [self._run_front, *[self._run_handler] * self._service.settings.handlers]
        self._loops = [asyncio.create_task(_keep(run)) for run in runs]
        self._telling = asyncio.create_task(self._tell())

    async def stop(self) -> None:
        """End the front, which hands out its last answers, and then the handlers."""
        self._telling.cancel()
        for loop in self._loops:
            loop.cancel()
            await asyncio.wait({loop})

    async def _run_front(self) -> int:
        self._control, theirs = socket.socketpair()  # over which it gets its sockets to handlers
        return await _run("vlmrm.serving.front", self._start, [theirs], self._listener)

    async def _run_handler(self) -> int:
        (ours, to_core), (of_front, to_front) = socket.socketpair(), socket.socketpair()
        link = partial(HandlerLink, self._service, self._links)
        await asyncio.get_running_loop().create_unix_connection(link, sock=ours)
        with of_front, suppress(OSError):  # the front has gone: so will the handler, and another comes
            socket.send_fds(self._control, [b"h"], [of_front.fileno()])
        return await _run("vlmrm.serving.handler", self._start_of_handlers, [to_core, to_front])

    async def _tell(self) -> None:
        """Tell handlers of the core's state whenever it changes."""
        told = None
        while True:
            state = self._service.state
            if state != told:
                told = state
                for link in self._links:
                    link.tell({"state": asdict(state)})
            await asyncio.sleep(STATE_S)


async def _run(module: str, start: dict[str, Any], ends: list[socket.socket], *shared: socket.socket) -> int:
    """Run a module as a process, which alone has these `ends`, until it ends; `start` is what it reads first."""
    numbers = [end.fileno() for end in (*ends, *shared)]
    with ExitStack() as given:
        for end in ends:
            given.enter_context(end)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *map(str, numbers)),
            pass_fds=numbers,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the core's to handle
        )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(start).encode())
        process.stdin.close()
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), ENDING_S)
        if process.returncode is None:
            process.kill()


async def _keep(run: Callable[[], Awaitable[int]]) -> NoReturn:
    """Run a process until it ends, and then another."""
    while True:
        try:
            logger.error("a process of the service ended (%s): another is started", await run())
        except OSError as error:
            logger.error("a process of the service cannot be started (%s): it is tried again", error.strerror)
        await asyncio.sleep(PAUSE_S)


def _revealed(settings: Any) -> Any:
    """Return settings as JSON with their tokens, which the front compares."""

    def write(value: Any) -> Any:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    return json.loads(json.dumps(settings.model_dump(exclude_defaults=True), default=write))
