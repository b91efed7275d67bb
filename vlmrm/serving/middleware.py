"""Middleware around every request: its id, token, limits, log line and answer in any case."""

from __future__ import annotations

import itertools
import logging
import math
import re
import resource
import time
import uuid

from fastapi import Request
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmrm.serving.bodies import METHODS, too_large
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
HEADER_BYTES = 64 * 2**10  # of a request, its address among them
HEADERS = [  # of every response
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
REFUSALS_S = 1.0  # between two lines of the log about requests with a 503
RESERVED_FILES = 192  # of the process's open files, for workers, Redis and connections whose request is not read yet


def connection_limit() -> int:
    """Return how many connections this process may have: its limit of open files less `RESERVED_FILES`."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES, RESERVED_FILES)


class RequestMiddleware:
    """The outermost middleware: the request's id, token, limits in bytes and time, log line, and answer in any case.

    It is plain ASGI because Starlette's `BaseHTTPMiddleware` costs a task for each request.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.metrics = app, service.metrics
        self.limits = service.settings.limits
        self.max_requests = min(self.limits.max_requests, connection_limit())
        self.rewards = {reward.name: reward.token for reward in service.settings.reward_args}
        rewards = list(self.rewards.values())
        self._posted = 0  # POST requests that have no response yet
        # Requests with a 503 that have no line in the log, and the time of the last that has one.
        self._refused, self._logged = 0, -math.inf
        self.tokens = [service.settings.token, service.settings.admin_token, *rewards]
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
            await (refusal or self.app)(scope, receive, send_with_headers)
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
        if scope["path"] not in OPEN:
            token = token_of(Request(scope))
            # Any token will do where the reward is named in the body: the route checks that it opens the reward.
            known = self.open or is_allowed(token, self.tokens)
            if not known or not is_allowed(token, self._tokens_of(scope["path"])):
                return response_to(unauthorized())
        if (fault := _unread(scope, headers)) is not None:
            return error_response(*fault)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.max_body_bytes:
            return response_to(too_large(self.limits))
        if method == "POST" and self._posted > self.max_requests:
            message = f"the service is busy with {self.max_requests} requests: try again later."
            return error_response(message, "Overloaded", 503, {"Retry-After": "1"})
        if method == "POST" and headers.get(b"sec-fetch-site") == b"cross-site":
            message = "the request comes from a web page of another site: only the service's own page may send it."
            return error_response(message, "InvalidRequest", 403)
        nameless = b"host" not in headers and scope["http_version"] == "1.0"  # which no browser speaks
        if self.open and not (nameless or LOCAL_NAME.fullmatch(headers.get(b"host", b"").decode("latin-1"))):
            names = ", ".join(LOOPBACK)
            message = f"the Host header is none of this machine's names, {names}: use one, or set VLMRM_TOKEN."
            return error_response(message, "InvalidRequest", 421)
        return None

    def _tokens_of(self, path: str) -> list[SecretStr]:
        """Return the tokens of the reward that a path begins with, `/NAME/...`; none for any other path."""
        name, slash, _ = path[1:].partition("/")
        return [self.tokens[0], self.rewards[name]] if slash and name in self.rewards else []

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        # Not the path of the request: clients could fill metrics and logs with paths that do not exist.
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.record_request(route, status, seconds)
        level = logging.DEBUG if route in QUIET and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields = {"method": scope["method"][:16], "route": route, "status": status, "ms": round(1000 * seconds, 1)}
        if status == 503:  # a flood of them would cost more to log than to refuse
            self._refused += 1
            if (now := time.monotonic()) - self._logged < REFUSALS_S:
                return
            fields["refused"] = self._refused  # since the last such line
            self._refused, self._logged = 0, now
        logger.log(level, "request", extra={"fields": fields})


def _unread(scope: Scope, headers: dict[bytes, bytes]) -> tuple[str, str, int] | None:
    """Return the error of a request with a part that would not be read; None where all is."""
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(map(len, itertools.chain(*scope["headers"])))
    if size > HEADER_BYTES:
        return f"address and headers are {size} bytes, over the limit of {HEADER_BYTES}.", "InvalidRequest", 431
    if scope["method"] not in METHODS:
        return None
    if scope["query_string"]:
        name = scope["query_string"].partition(b"=")[0][:40].decode("latin-1")
        return f"?{name} of the address would not be read: put it into the body.", "InvalidRequest", 400
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() not in ("", "identity"):
        return f"the body has the Content-Encoding {coding[:40]}: send it as it is.", "InvalidRequest", 415
    if b"upgrade" in headers and b"upgrade" in headers.get(b"connection", b"").lower():
        protocol = headers[b"upgrade"].decode("latin-1")[:40]
        return f"the request asks for an upgrade to {protocol}: send it in HTTP/1.1 alone.", "InvalidRequest", 400
    return None
