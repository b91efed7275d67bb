"""The process of a handler: requests of the front go through the application, which asks the core; it has no token."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI

from vlmrm.serving.app import create_app
from vlmrm.serving.backend import Job, Status
from vlmrm.serving.clients import Client, RequestContext, begin_request, current_request
from vlmrm.serving.front import REVISION_HEADER
from vlmrm.serving.links import Link, read_status, write_job
from vlmrm.serving.replica import WorkerHealth
from vlmrm.serving.service import CoreState
from vlmrm.serving.settings import ServiceSettings
from vlmrm.serving.telemetry import log_lines
from vlmrm.serving.worker.channel import die_with_parent


class RemoteCore:
    """The core, asked over `link`; `state` is what it said last."""

    def __init__(self) -> None:
        self.link = Link(told=self._learn)
        self.known = asyncio.Event()  # that it has a state
        self.state = CoreState({}, None, False, {}, None)

    def _learn(self, message: dict[str, Any]) -> None:
        state = message["state"]
        healths = {name: WorkerHealth(**health) for name, health in state.pop("rewards").items()}
        decoder = state.pop("decoder")
        self.state = CoreState(healths, None if decoder is None else WorkerHealth(**decoder), **state)
        self.known.set()

    async def score(self, job: Job, timeout: float, patience: float, arrived: float) -> tuple[str, Status]:
        job_id, status = await self._ask("score", write_job(job), timeout, patience, arrived)
        return job_id, read_status(status)

    async def put(self, job: Job) -> str:
        return await self._ask("put", write_job(job))

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        status = await self._ask("wait", job_id, timeout)
        return None if status is None else read_status(status)

    def __getattr__(self, name: str) -> Any:
        """Return another method of the core, whose arguments and result need no packing of their own."""
        return partial(self._ask, name)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        current_request().release()
        return await self.link.ask({"name": name, "arguments": arguments})


async def answer(app: FastAPI, release: Callable[[int], None], asked: dict[str, Any]) -> dict[str, Any]:
    """Have a request answered by the application; `release` is called once it waits for something else."""
    parts = asked["headers"].split(b"\0")
    headers = list(zip(parts[::2], parts[1::2], strict=False))
    wanted = dict(headers).get(REVISION_HEADER, b"").decode("latin-1")
    deadline = math.inf if asked["deadline"] is None else asked["deadline"]
    context = RequestContext(asked["id"], Client(**asked["client"]), deadline, len(asked["body"]), wanted)
    context.arrived, context.release = asked["arrived"], partial(release, asked["number"])
    begin_request(context)
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": asked["method"], "path": asked["path"], "raw_path": asked["path"].encode(),
        "query_string": asked["query"], "headers": headers, "client": (asked["peer"], 0),
        "server": None, "state": {"client": context.client},
    }  # fmt: skip
    begun: dict[str, Any] = {}
    pieces: list[bytes] = []
    bodies = [asked["body"]]

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.Future()  # a client that goes ends the task
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(part: Any) -> None:
        if part["type"] == "http.response.start":
            begun.update(part)
        else:
            pieces.append(part.get("body", b""))

    await app(scope, receive, send)
    shown = [(name, value) for name, value in begun["headers"] if name.lower() != b"content-length"]
    if context.revisions:
        shown.append((REVISION_HEADER, ", ".join(sorted(set(context.revisions.values()))).encode()))
    return {
        "status": begun["status"],
        "headers": [(name.decode("latin-1"), value.decode("latin-1")) for name, value in shown],
        "body": b"".join(pieces),
        "route": getattr(scope.get("route"), "path", "other"),
    }


class FrontLink(Link):
    """A socket to the front, whose requests are answered by the application."""

    def __init__(self, app: FastAPI):
        super().__init__(partial(answer, app, lambda number: self.tell({"release": number})))


async def run(start: dict[str, Any], to_core: socket.socket, to_front: socket.socket) -> None:
    """Handle what the front asks until it or the core has gone."""
    loop, core = asyncio.get_running_loop(), RemoteCore()
    settings = ServiceSettings.model_validate(start["settings"])
    log_lines(settings)
    app = create_app(settings, core, requests=start["requests"])
    await loop.create_unix_connection(lambda: core.link, sock=to_core)
    await core.known.wait()
    _, front = await loop.create_unix_connection(partial(FrontLink, app), sock=to_front)
    front.tell({"release": 0})  # it is ready
    await asyncio.wait({front.lost, core.link.lost}, return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(run(json.load(sys.stdin), *(socket.socket(fileno=int(number)) for number in sys.argv[1:])))
