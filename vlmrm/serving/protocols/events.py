"""Server-sent events of a request that may take long: where its jobs are, and at the end its answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vlmrm.errors import VlmrmError
from vlmrm.serving.backend import Backend, QueueAway, State
from vlmrm.serving.errors import error_of, response_to

LOOK_S = 0.5  # between two looks at the queue
ALIVE_S = 15.0  # without an event, after which a comment keeps proxies from closing the connection

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "With that in Accept."}
}
Jobs: TypeAlias = list[tuple[str, str]]
"""The reward and id of each job that is accepted."""


class EventResponse(StreamingResponse):
    """Events until `answering` is done, which is cancelled when the client goes.

    Args:
        jobs: those of `answering`, which fills them in.
    """

    def __init__(self, backend: Backend, answering: Coroutine[Any, Any, BaseModel], jobs: Jobs):
        self._answering = asyncio.ensure_future(answering)
        # nginx would hold events back.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_events(backend, self._answering, jobs), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.cancel()


async def _events(backend: Backend, answering: asyncio.Future[BaseModel], jobs: Jobs) -> AsyncGenerator[str]:
    said, moment, position = "", time.monotonic(), None
    while not answering.done():
        event = said
        with suppress(QueueAway):
            waiting = await _waiting(backend, jobs)
            if waiting:
                position = waiting if position is None else min(position, waiting)
                event = _event("queued", json.dumps({"position": position}))
            elif jobs:
                event = _event("running", "{}")
        if event != said or time.monotonic() - moment > ALIVE_S:
            yield event if event != said else ": keep-alive\n\n"
            said, moment = event, time.monotonic()
        await asyncio.wait({answering}, timeout=LOOK_S)
    try:
        yield _event("done", (await answering).model_dump_json())
    except VlmrmError as error:
        told = {"status": response_to(error).status_code, "error": error_of(error).model_dump()}
        yield _event("failed", json.dumps(told))


async def _waiting(backend: Backend, jobs: Jobs) -> int:
    """Return how many jobs wait where one of `jobs` does; 0 once none does."""
    statuses = [(reward, await backend.status(job)) for reward, job in jobs]
    queued = [reward for reward, status in statuses if status is not None and status.state is State.queued]
    return max([(await backend.depth(reward))[0] for reward in queued], default=0)


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
