"""Around every request: its id, its token, its bounds in bytes and time, its log line, and an answer in any case."""

from __future__ import annotations

import logging
import re
import time
import uuid

from anyio import fail_after
from fastapi import HTTPException, Request
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmrm.serving.access import opens, token_of, unauthorized
from vlmrm.serving.refusals import answer_to, error_answer
from vlmrm.serving.request_log import REQUEST_ID
from vlmrm.serving.service import Service
from vlmrm.serving.settings import LOOPBACK
from vlmrm.serving.turns import Turns

logger = logging.getLogger("vlmrm")

GIVEN_ID = re.compile(r"[\w.\-]{1,64}", re.ASCII)
# A name in Host that is none of these, on a service without tokens, is a web page that had its own name resolved to
# this machine (DNS rebinding). An address cannot be rebound.
OWN_NAME = re.compile(r"(localhost|[\w\-.]+\.localhost|[\d.]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
OPEN = ("/health", "/ready")
QUIET = ("/health", "/ready", "/metrics", "/v1/status")  # asked every few seconds by machines
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class Edge:
    """ASGI middleware, the outermost. It is plain ASGI because Starlette's own kind costs a task for each request."""

    def __init__(self, app: ASGIApp, service: Service, turns: Turns):
        self.app, self.metrics, self.turns = app, service.metrics, turns
        self.limits = service.settings.limits
        self.host = service.settings.host
        rewards = [reward.token for reward in service.settings.reward_args]
        self._posted = 0  # that have no answer yet
        self.tokens = [service.settings.token, *rewards]
        self.open = not service.settings.token.get_secret_value() and not all(map(SecretStr.get_secret_value, rewards))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id.encode()), *HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        posted = scope["method"] == "POST"
        self._posted += posted
        try:
            refusal = self._refusal(scope, headers)
            await (refusal or self.app)(scope, self._bounded(receive), sent)
        except Exception:
            logger.exception("a request broke the service")
            if not status:
                message = f"the service failed: tell its operator the request id {request_id}."
                await error_answer(message, "InternalError", 500)(scope, receive, sent)
        finally:
            self._posted -= posted
            self._note(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp | None:
        method = scope["method"]
        # Before a byte of the body is read. Which reward a token opens, its route knows.
        if not self.open and scope["path"] not in OPEN and not opens(token_of(Request(scope)), self.tokens):
            return answer_to(unauthorized())
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.max_body_bytes:
            return error_answer(self._too_large(), "TooLarge", 413)
        if method == "POST" and self._posted > self.limits.max_requests:
            message = f"the service is busy with {self.limits.max_requests} requests: try again later."
            return error_answer(message, "Overloaded", 503, {"Retry-After": "1"})
        if method == "POST" and headers.get(b"sec-fetch-site") == b"cross-site":
            return error_answer("a web page of another site asks: the service answers its own.", "InvalidRequest", 403)
        host = headers.get(b"host", b"").decode("latin-1")
        nameless = b"host" not in headers and scope.get("http_version") == "1.0"  # which no browser speaks
        if self.open and not (nameless or OWN_NAME.fullmatch(host) or host.partition(":")[0] == self.host):
            names = ", ".join(LOOPBACK)
            return error_answer(
                f"a service without a token is asked by one of its machine's own names ({names}): use one, or set "
                "VLMRM_TOKEN.",
                "InvalidRequest",
                421,
            )
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """The body, refused as soon as it is over the limit, in bytes or in time."""
        read, whole = 0, False
        end = time.monotonic() + self.limits.body_timeout

        async def bounded() -> Message:
            nonlocal read, whole
            if whole:  # what comes now is that the client has gone
                return await receive()
            try:
                with fail_after(max(end - time.monotonic(), 0.001)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come in {self.limits.body_timeout:g} s.") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.limits.max_body_bytes:
                # FastAPI passes on this error alone of those that are raised while it reads a body.
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            if whole:
                await self.turns.take()
            return message

        return bounded

    def _too_large(self) -> str:
        return f"the body is over the limit of {self.limits.max_body_bytes} bytes: send fewer items at a time."

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")  # a path as sent would make metrics and logs grow
        self.metrics.answered(route, status, seconds)
        level = logging.DEBUG if route in QUIET and status < 400 else logging.INFO
        if logger.isEnabledFor(level):
            fields = {"method": scope["method"][:16], "route": route, "status": status, "ms": round(1000 * seconds, 1)}
            logger.log(level, "request", extra={"fields": fields})
