"""The process of a handler: requests come over a socket, go through the application, and their answers back."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import FastAPI

from vlmrm.errors import VlmrmError
from vlmrm.serving.app import create_app
from vlmrm.serving.backend import Job, Status
from vlmrm.serving.clients import Client, RequestContext, begin_request, current_request
from vlmrm.serving.errors import error_answer, error_content, read_error
from vlmrm.serving.frames import Frames, read_status, write_job
from vlmrm.serving.front import REVISION_HEADER
from vlmrm.serving.replica import WorkerHealth
from vlmrm.serving.service import CoreState
from vlmrm.serving.settings import ServiceSettings
from vlmrm.serving.telemetry import export_spans, log_lines
from vlmrm.serving.worker.channel import die_with_parent

logger = logging.getLogger("vlmrm")


class Answerer:
    """Has requests answered by an application; `send` gets messages for the core."""

    def __init__(self, app: FastAPI, send: Callable[[dict[str, Any]], None]):
        self._app, self._send = app, send
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def receive(self, message: dict[str, Any]) -> None:
        """Begin a request, or end one whose client has gone."""
        if "cancel" in message:
            if (task := self._tasks.get(message["cancel"])) is not None:
                task.cancel()
            return
        number = message["request"]
        task = self._tasks[number] = asyncio.create_task(self._answer(message))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, asked: dict[str, Any]) -> None:
        number, body = asked["request"], asked["body"]
        parts = asked["headers"].split(b"\0")
        headers = list(zip(parts[::2], parts[1::2], strict=False))
        wanted = dict(headers).get(REVISION_HEADER, b"").decode("latin-1")
        deadline = math.inf if asked["deadline"] is None else asked["deadline"]
        context = RequestContext(number, asked["id"], Client(**asked["client"]), deadline, len(body), wanted)
        context.arrived, context.release = asked["arrived"], partial(self._send, {"release": number})
        begin_request(context)
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": asked["method"], "path": asked["path"], "raw_path": asked["path"].encode(),
            "query_string": asked["query"], "headers": headers, "client": (asked["peer"], 0),
            "server": None, "state": {"client": context.client},
        }  # fmt: skip
        answer: dict[str, Any] = {"status": 500, "headers": [], "body": b""}
        pieces: list[bytes] = []
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await asyncio.Future()  # a client that goes ends the task
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(part: Any) -> None:
            if part["type"] == "http.response.start":
                answer["status"], answer["headers"] = part["status"], list(part.get("headers", ()))
            else:
                pieces.append(part.get("body", b""))

        try:
            await self._app(scope, receive, send)
            answer["body"] = b"".join(pieces)
        except VlmrmError as error:
            answer["status"], texts, answer["body"] = error_answer(error)
            answer["headers"] = [(name.encode(), value.encode()) for name, value in texts]
        except Exception:
            logger.exception("a request broke the service", extra={"fields": {"request_id": context.id}})
            message = f"the service failed: tell its operator the request id {context.id}."
            answer["body"] = json.dumps(error_content(message, "InternalError")).encode()
            answer["headers"] = [(b"content-type", b"application/json")]
        shown = [(name, value) for name, value in answer["headers"] if name.lower() != b"content-length"]
        if context.revisions:
            shown.append((REVISION_HEADER, ", ".join(sorted(set(context.revisions.values()))).encode()))
        answer["headers"] = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in shown]
        self._send({"answer": number, "route": getattr(scope.get("route"), "path", "other"), **answer})


class RemoteCore:
    """The core, asked over a socket; `state` is what it said last."""

    def __init__(self) -> None:
        self.frames = Frames(self.receive)
        self.known = asyncio.Event()  # that it has a state
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.state = CoreState({}, None, False, {}, None)

    def receive(self, message: dict[str, Any]) -> None:
        if "reply" in message:
            self._settle(message)
            return
        state = message["state"]
        healths = {name: WorkerHealth(**health) for name, health in state["rewards"].items()}
        decoder = None if state["decoder"] is None else WorkerHealth(**state["decoder"])
        self.state = CoreState(healths, decoder, state["draining"], state["errors"], state["queue"])
        self.known.set()

    def _settle(self, message: dict[str, Any]) -> None:
        """Have a call end with its reply."""
        reply = self._replies.pop(message["reply"], None)
        if reply is None or reply.done():
            return
        if "error" in message:
            reply.set_exception(read_error(message["error"]))
        else:
            reply.set_result(message["result"])

    async def score(self, job: Job, timeout: float, patience: float, arrived: float) -> tuple[str, Status]:
        arguments = {"job": write_job(job), "timeout": timeout, "patience": patience, "arrived": arrived}
        job_id, status = await self._call("score", **arguments)
        return job_id, read_status(status)

    async def put(self, job: Job) -> str:
        return await self._call("put", job=write_job(job))

    async def wait(self, job_id: str, timeout: float) -> Status | None:
        status = await self._call("wait", job_id=job_id, timeout=timeout)
        return None if status is None else read_status(status)

    def __getattr__(self, name: str) -> Any:
        """Return another method of the core, whose arguments and result need no packing of their own."""
        return partial(self._call, name)

    async def _call(self, what: str, /, *positional: Any, **arguments: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        current_request().release()
        self.frames.send({"call": number, "name": what, "positional": positional, "arguments": arguments})
        try:
            return await reply
        except asyncio.CancelledError:
            self.frames.send({"call": number})
            raise
        finally:
            self._replies.pop(number, None)


async def run(front: socket.socket, core: socket.socket) -> None:
    """Handle what comes over a socket until it is closed."""
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
    frames, remote = Frames(messages.put_nowait), RemoteCore()
    await loop.create_unix_connection(lambda: frames, sock=front)
    await loop.create_unix_connection(lambda: remote.frames, sock=core)
    start = await messages.get()
    settings = ServiceSettings.model_validate(start["settings"])
    log_lines(settings)
    export_spans()
    answerer = Answerer(create_app(settings, remote, requests=start["requests"]), frames.send)
    await remote.known.wait()
    while not messages.empty():
        answerer.receive(messages.get_nowait())
    frames.receive = answerer.receive
    await frames.lost


if __name__ == "__main__":
    die_with_parent()
    os.nice(10)  # the front and the core go first: they cost little, and everybody waits for them
    with suppress(KeyboardInterrupt):
        asyncio.run(run(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])))
