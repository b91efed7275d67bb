"""The core's side of the other processes: it keeps the front running, and answers the calls of handlers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import SecretStr

from vlmrm.errors import VlmrmError
from vlmrm.serving.errors import write_error
from vlmrm.serving.frames import Frames, keep, read_job, start_process, write_status
from vlmrm.serving.service import CoreState, Service
from vlmrm.serving.worker.channel import pack

logger = logging.getLogger("vlmrm")

STATE_S = 0.1  # between two looks whether handlers have to learn something
ENDING_S = 15.0  # for the front to hand out its last answers


async def _score(service: Service, job: dict[str, Any], **arguments: Any) -> Any:
    job_id, status = await service.score(read_job(job), **arguments)
    return [job_id, write_status(status)]


async def _put(service: Service, job: dict[str, Any]) -> str:
    return await service.put(read_job(job))


async def _wait(service: Service, **arguments: Any) -> dict[str, Any] | None:
    status = await service.wait(**arguments)
    return None if status is None else write_status(status)


PACKED: dict[str, Callable[..., Awaitable[Any]]] = {"score": _score, "put": _put, "wait": _wait}
PLAIN = ("cancel", "save_record", "load_record", "describe", "measure", "operate")


class HandlerLink:
    """A socket to a handler: its calls are answered, and cancelled where it dies or abandons them."""

    def __init__(self, service: Service):
        self._service = service
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.frames = Frames(self._receive)

    def tell(self, state: CoreState) -> None:
        self.frames.send({"state": asdict(state)})

    def end(self) -> None:
        for call in list(self._calls.values()):
            call.cancel()

    def _receive(self, message: dict[str, Any]) -> None:
        number = message["call"]
        if "name" in message:
            self._calls[number] = asyncio.create_task(self._call(number, message))
        elif (call := self._calls.get(number)) is not None:
            call.cancel()

    async def _call(self, number: int, message: dict[str, Any]) -> None:
        name, arguments = message["name"], message["arguments"]
        try:
            if name in PLAIN:
                result = {"result": await getattr(self._service, name)(*message["positional"], **arguments)}
            else:
                result = {"result": await PACKED[name](self._service, **arguments)}
        except VlmrmError as error:
            result = {"error": write_error(error)}
        except Exception as error:
            logger.exception("a request broke the service")
            result = {"error": {"type": "", "message": f"the service failed ({type(error).__name__})"}}
        finally:
            del self._calls[number]
        self.frames.send({"reply": number, **result})


class FrontProcess:
    """The front, listening in a process of its own, which is replaced where it ends."""

    def __init__(self, service: Service, listener: socket.socket, requests: bool):
        self._service, self._listener = service, listener
        self._start = {"settings": _revealed(service), "requests": requests}
        self._links: set[HandlerLink] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        self._loops = [asyncio.create_task(keep("the front", self._run)), asyncio.create_task(self._tell())]

    async def stop(self) -> None:
        """Have the front hand out its last answers, and end it."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), ENDING_S)
            if self._process.returncode is None:
                self._process.kill()

    async def _run(self) -> int:
        """Start a front, and take the sockets that it sends until it ends."""
        loop = asyncio.get_running_loop()
        control, remote = socket.socketpair()
        with remote:
            self._process = await start_process("vlmrm.serving.handlers", remote, self._listener)
        self._control = control
        try:
            await loop.run_in_executor(None, control.sendall, pack(self._start))
            control.setblocking(False)
            loop.add_reader(control, self._take_links, control)
            return await self._process.wait()
        finally:
            loop.remove_reader(control)

    def _take_links(self, control: socket.socket) -> None:
        data, files, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            asyncio.get_running_loop().remove_reader(control)
        for file in files:
            self._loops.append(asyncio.create_task(self._link(socket.socket(fileno=file))))

    async def _link(self, end: socket.socket) -> None:
        link = HandlerLink(self._service)
        await asyncio.get_running_loop().create_unix_connection(lambda: link.frames, sock=end)
        self._links.add(link)
        link.tell(self._service.state)
        await link.frames.lost
        self._links.discard(link)
        link.end()

    async def _tell(self) -> None:
        """Tell handlers of the core's state whenever it changes."""
        told = None
        while True:
            state = self._service.state
            if state != told:
                told = state
                for link in self._links:
                    link.tell(state)
            await asyncio.sleep(STATE_S)


def _revealed(service: Service) -> dict[str, Any]:
    """Return the settings as JSON with their tokens, which the front compares."""

    def write(value: Any) -> Any:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    content = service.settings.model_dump(exclude_defaults=True)
    return json.loads(json.dumps(content, default=write))
