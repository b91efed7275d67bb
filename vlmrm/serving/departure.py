"""A client that goes before its answer: nobody computes it any more."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Departures:
    """ASGI middleware: cancels what handles a request once its client has gone, which servers leave to it.

    `Serving.score` then cancels the job, unless others wait for the same one.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        handling = asyncio.current_task()
        departure: asyncio.Task[Message] | None = None
        answered = gone = False

        async def leave() -> Message:
            nonlocal gone
            message = await receive()  # the body has been read: it can only be that the client has gone
            if not answered and handling is not None:
                gone = True
                handling.cancel()
            return message

        async def received() -> Message:
            nonlocal departure
            if departure is not None:
                return await asyncio.shield(departure)
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                departure = asyncio.create_task(leave())
            return message

        async def sent(message: Message) -> None:
            nonlocal answered
            answered = answered or not message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        try:
            await self.app(scope, received, sent)
        except asyncio.CancelledError:
            if not gone:
                raise
        finally:
            if departure is not None:
                departure.cancel()
