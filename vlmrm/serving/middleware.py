"""Middleware around every request: its id, token, limits, log line and answer in any case."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import deque

from anyio import fail_after
from fastapi import HTTPException, Request
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmrm.serving.errors import error_response, response_to
from vlmrm.serving.service import Service
from vlmrm.serving.settings import LOOPBACK
from vlmrm.serving.telemetry import REQUEST_ID
from vlmrm.serving.tokens import is_allowed, token_of, unauthorized

logger = logging.getLogger("vlmrm")

CLIENT_ID = re.compile(r"[\w.\-]{1,64}", re.ASCII)
# Any other name in Host, on a service without tokens, is of a web page that had its own name resolved to this machine
# (DNS rebinding). An address cannot be rebound.
LOCAL_NAME = re.compile(r"(localhost|[\w\-.]+\.localhost|[\d.]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
OPEN = ("/health", "/ready")
QUIET = ("/health", "/ready", "/metrics", "/v1/status")  # polled every few seconds: logged at the level of debugging
HEADERS = [  # of every response
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class RequestMiddleware:
    """The outermost middleware: the request's id, token, limits in bytes and time, log line, and answer in any case.

    It is plain ASGI because Starlette's `BaseHTTPMiddleware` costs a task for each request.
    """

    def __init__(self, app: ASGIApp, service: Service, scheduler: TurnScheduler):
        self.app, self.metrics, self.scheduler = app, service.metrics, scheduler
        self.limits = service.settings.limits
        self.host = service.settings.host
        rewards = [reward.token for reward in service.settings.reward_args]
        self._posted = 0  # POST requests that have no response yet
        self.tokens = [service.settings.token, *rewards]
        self.open = not service.settings.token.get_secret_value() and not all(map(SecretStr.get_secret_value, rewards))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = client_id if CLIENT_ID.fullmatch(client_id) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), *HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        posted = scope["method"] == "POST"
        self._posted += posted
        try:
            refusal = self._refusal(scope, headers)
            await (refusal or self.app)(scope, self._limited(receive), send_with_headers)
        except Exception:
            logger.exception("a request broke the service")
            if not status:
                message = f"the service failed: tell its operator the request id {request_id}."
                await error_response(message, "InternalError", 500)(scope, receive, send_with_headers)
        finally:
            self._posted -= posted
            self._log(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp | None:
        """Return the response to a request that is refused before a byte of its body is read."""
        method = scope["method"]
        # Any token will do here: the route checks that it opens the reward.
        if not self.open and scope["path"] not in OPEN and not is_allowed(token_of(Request(scope)), self.tokens):
            return response_to(unauthorized())
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.max_body_bytes:
            return error_response(self._too_large(), "TooLarge", 413)
        if method == "POST" and self._posted > self.limits.max_requests:
            message = f"the service is busy with {self.limits.max_requests} requests: try again later."
            return error_response(message, "Overloaded", 503, {"Retry-After": "1"})
        if method == "POST" and headers.get(b"sec-fetch-site") == b"cross-site":
            message = "the request comes from a web page of another site: only the service's own page may send it."
            return error_response(message, "InvalidRequest", 403)
        host = headers.get(b"host", b"").decode("latin-1")
        nameless = b"host" not in headers and scope.get("http_version") == "1.0"  # which no browser speaks
        if self.open and not (nameless or LOCAL_NAME.fullmatch(host) or host.partition(":")[0] == self.host):
            names = ", ".join(LOOPBACK)
            return error_response(
                f"the Host header is none of this machine's names ({names}), and the service has no token: use one of "
                "them, or set VLMRM_TOKEN.",
                "InvalidRequest",
                421,
            )
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` with a body that is refused as soon as it is over the limit, in bytes or in time."""
        size, complete = 0, False
        end = time.monotonic() + self.limits.body_timeout

        async def limited() -> Message:
            nonlocal size, complete
            if complete:  # what comes after the body is that the client disconnects
                return await receive()
            try:
                with fail_after(max(end - time.monotonic(), 0.001)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come in {self.limits.body_timeout:g} s.") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.limits.max_body_bytes:
                # While it reads a body, FastAPI passes on no other error than HTTPException.
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            if complete:
                await self.scheduler.next_turn()
            return message

        return limited

    def _too_large(self) -> str:
        return f"the body is over the limit of {self.limits.max_body_bytes} bytes: send fewer items at a time."

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        # Not the path of the request: clients could fill metrics and logs with paths that do not exist.
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.record_request(route, status, seconds)
        level = logging.DEBUG if route in QUIET and status < 400 else logging.INFO
        if logger.isEnabledFor(level):
            fields = {"method": scope["method"][:16], "route": route, "status": status, "ms": round(1000 * seconds, 1)}
            logger.log(level, "request", extra={"fields": fields})


class DisconnectMiddleware:
    """ASGI middleware that cancels the handler of a request once its client has disconnected; servers do not.

    `Gateway.score` then cancels the job, unless other requests wait for the same one.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        handler = asyncio.current_task()
        watching: asyncio.Task[Message] | None = None
        answered = disconnected = False

        async def watch() -> Message:
            nonlocal disconnected
            message = await receive()  # the body has been read: only a disconnect can come
            if not answered and handler is not None:
                disconnected = True
                handler.cancel()
            return message

        async def receive_and_watch() -> Message:
            nonlocal watching
            if watching is not None:
                return await asyncio.shield(watching)
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                watching = asyncio.create_task(watch())
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal answered
            answered = answered or not message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        try:
            await self.app(scope, receive_and_watch, send_and_note)
        except asyncio.CancelledError:
            if not disconnected:
                raise
        finally:
            if watching is not None:
                watching.cancel()


class TurnScheduler:
    """Lets one request go on in each round of the event loop, first come, first served.

    Without it, a hundred bodies or results that arrive together block `/health` for a tenth of a second.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next_turn(self) -> None:
        """Wait for a round of the event loop that no other request uses."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._run_next)
        await turn

    def _run_next(self) -> None:
        turn = self._waiting.popleft()
        if not turn.done():  # its request may have been cancelled
            turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run_next)
