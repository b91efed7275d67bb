"""Middleware around every request: its id, token, limits, body, turn and log line, and an answer in any case."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import math
import re
import resource
import time
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmrm.errors import VlmrmError
from vlmrm.serving.backend import QueueAway
from vlmrm.serving.clients import Client
from vlmrm.serving.errors import InvalidRequest, SlowBody, TimedOut, Unauthorized, error_response, response_to
from vlmrm.serving.event_loop import LANE, RequestContext, begin_request
from vlmrm.serving.gateway import Gateway
from vlmrm.serving.service import TooLarge
from vlmrm.serving.settings import LOOPBACK
from vlmrm.serving.telemetry import REQUEST_ID
from vlmrm.serving.worker_spec import DIGITS

logger = logging.getLogger("vlmrm")

CLIENT_ID = re.compile(r"[\w.\-]{1,64}", re.ASCII)
# Any other name in Host, on a service without tokens, is of a web page that had its own name resolved to this machine
# (DNS rebinding). An address cannot be rebound.
LOCAL_NAME = re.compile(r"(localhost|[\w\-.]+\.localhost|[\d.]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
OPEN = ("/health", "/ready")
OPERATORS = "/v1/rewards/"  # begins the addresses that only the operator's token opens
QUIET = ("/health", "/ready", "/metrics", "/v1/status")  # polled every few seconds: logged at the level of debugging
HEADER_BYTES = 64 * 2**10  # of a request, its address among them
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]  # of every response
REVISION_HEADER = b"x-vlmrm-revision"  # in a request the one that it demands, in an answer those that computed it
METHODS = ("POST", "PUT", "PATCH", "DELETE")  # that have a body
REFUSALS_S = 1.0  # between two lines of the log about requests with a 503
RESERVED_FILES = 192  # of the process's open files, for workers, Redis and connections whose request is not read yet
IDLE_S = 15.0  # between two pieces of a body
LASTING = 1 / 2  # of `max_wait`, once the queue has lasted so long: a burst ends, while overload would keep it full
SMALL_BYTES, FEW_VALUES = 64 * 2**10, 1000


class Busy(QueueAway):
    """The service itself has more requests than it can answer in time."""


class ClientGone(Exception):
    """The client has disconnected: nobody waits for an answer."""


def connection_limit() -> int:
    """Return how many connections this process may have: its limit of open files less `RESERVED_FILES`."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES, RESERVED_FILES)


class RequestMiddleware:
    """The one middleware, in plain ASGI, as Starlette's `BaseHTTPMiddleware` costs a task for each request.

    A request is refused before it is parsed where it would wait longer than `max_wait` for its turn, but for
    `results`: refused, they would come again, and be computed for nothing. A handler whose client has left is ended.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, results: Sequence[str] = ()):
        self.app, self.gateway, self.scheduler, self.results = app, gateway, gateway.scheduler, results
        self.metrics, self.limits = gateway.service.metrics, gateway.settings.limits
        self.max_requests = min(self.limits.max_requests, connection_limit())
        self.open = gateway.clients.open
        self._posted = 0  # POST requests that have no response yet
        self._bytes = 0  # of bodies in memory: what is announced costs its sender nothing, and may never come
        self._refused, self._logged = 0, -math.inf  # requests with a 503 that have no line in the log, the last's time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = client_id if CLIENT_ID.fullmatch(client_id) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)
        context = RequestContext()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), *HEADERS]
                if context.revisions:
                    added.append((REVISION_HEADER, ", ".join(sorted(set(context.revisions.values()))).encode()))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        posted = scope["method"] == "POST"
        self._posted += posted
        try:
            client = self.gateway.clients.identify(headers, (scope.get("client") or ("",))[0])
            if client is None and scope["path"] not in OPEN:
                raise Unauthorized
            scope.setdefault("state", {})["client"] = context.client = client or context.client
            if refusal := self._refusal(scope, headers, context.client):
                await refusal(scope, receive, send_with_headers)
            elif scope["method"] not in METHODS:
                await self.app(scope, receive, send_with_headers)
            else:
                context.deadline, context.wanted = _deadline(headers), _wanted(headers)
                begin_request(context)
                await self._handle(context, scope, receive, send_with_headers)
        except ClientGone:
            self.metrics.disconnects.inc()
        except VlmrmError as error:
            await response_to(error)(scope, receive, send_with_headers)
        except Exception:
            logger.exception("a request broke the service")
            if not status:
                message = f"the service failed: tell its operator the request id {request_id}."
                await error_response(message, "InternalError", 500)(scope, receive, send_with_headers)
        finally:
            self._bytes -= context.body_bytes
            self._posted -= posted
            self._log(scope, context.client, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], client: Client) -> ASGIApp | None:
        """Return the response to a request that is refused before a byte of its body is read."""
        method, path = scope["method"], scope["path"]
        name, slash, _ = path[1:].partition("/")
        # Where the reward is named in the body, the route checks that the client opens it.
        closed = slash and name in self.gateway.service.rewards and name not in client.rewards
        if closed or not (client.rewards or path in OPEN or path.startswith(OPERATORS)):
            raise Unauthorized
        if (fault := _unread(scope, headers)) is not None:
            return error_response(*fault)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.max_body_bytes:
            raise self._too_large()
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
        if path.startswith(OPERATORS):
            self.gateway.require_admin(client)
        return None

    async def _handle(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, take the request's turn, and end the handler with its client."""
        body = await self._read(receive, context)
        lane = context.client.lane(scope["path"], body)
        LANE.set(lane)
        context.is_small = len(body) < SMALL_BYTES and body.count(b",") < FEW_VALUES
        waits = scope["path"] not in self.results
        if waits:
            self._admit(lane)
        handler = asyncio.current_task()
        assert handler is not None
        answered = disconnected = given = False

        async def watch() -> Message:
            nonlocal disconnected
            message = await receive()  # the body has been read: only a disconnect can come
            if not answered:
                disconnected = True
                handler.cancel()
            return message

        async def replay() -> Message:
            nonlocal given
            if given:
                return await asyncio.shield(watching)
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def note(message: Message) -> None:
            nonlocal answered
            answered = answered or not message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        watching = asyncio.create_task(watch())
        try:
            if waits:
                await self.scheduler.next_turn()
            if time.monotonic() > context.deadline:
                raise TimedOut("the deadline of the request passed before its turn came: ask again, with more time.")
            await self.app(scope, replay, note)
        except asyncio.CancelledError:
            if not disconnected:
                raise
            handler.uncancel()
            raise ClientGone from None
        finally:
            watching.cancel()

    async def _read(self, receive: Receive, context: RequestContext) -> bytes:
        body = io.BytesIO()  # grows in place, while a join of 200 MB would stop the event loop
        end = min(time.monotonic() + self.limits.body_timeout, context.deadline)
        while True:
            try:
                async with asyncio.timeout(min(max(end - time.monotonic(), 0.001), IDLE_S)):
                    message = await receive()
            except TimeoutError:
                most = f"{self.limits.body_timeout:g} s, with {IDLE_S:g} s at most between two pieces"
                raise SlowBody(f"the body did not come in {most}: send it faster, or in parts.") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            size = body.write(message.get("body", b""))
            context.body_bytes += size
            self._bytes += size
            if context.body_bytes > self.limits.max_body_bytes:
                raise self._too_large()
            if self._bytes > (limit := self.limits.max_bodies_bytes):
                raise Busy(
                    f"the bodies of all requests together are over the limit of {limit} bytes: try again later."
                )
            if not message.get("more_body", False):
                return body.getvalue()

    def _admit(self, lane: str) -> None:
        """Raise Busy where a request of this lane would wait too long: in a burst, or while a queue lasts."""
        wait, limit = self.scheduler.wait(lane), self.limits.max_wait
        if wait > (limit if self.scheduler.standing() < limit else limit * LASTING):
            raise Busy(f"the service is busy for the next {wait:.1f} s: try again later.", wait)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the body is over the limit of {self.limits.max_body_bytes} bytes: send fewer items at a time."
        )

    def _log(self, scope: Scope, client: Client, status: int, seconds: float) -> None:
        # Not the path of the request: clients could fill metrics and logs with paths that do not exist.
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(client.label, route, str(status)).inc()  # 0 where the client had disconnected
        self.metrics.request_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if route in QUIET and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields = {"client": client.name or "unknown", "method": scope["method"][:16], "route": route}
        fields |= {"status": status, "ms": round(1000 * seconds, 1)}
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


def _deadline(headers: dict[bytes, bytes]) -> float:
    """Return when the request ends by its client's clock; raises InvalidRequest for a time that is none."""
    text = headers.get(b"x-request-timeout")
    if text is None:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("the header X-Request-Timeout is no number of seconds above 0: send 30, say.")
    return time.monotonic() + seconds


def _wanted(headers: dict[bytes, bytes]) -> str:
    """Return the revision that a request demands, "" for none; raises InvalidRequest for a text that is none."""
    text = headers.get(REVISION_HEADER, b"").decode("latin-1")
    if text and not re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", text):
        raise InvalidRequest(f"X-Vlmrm-Revision is no revision, {DIGITS} hexadecimal digits: GET /v1/models has them.")
    return text
