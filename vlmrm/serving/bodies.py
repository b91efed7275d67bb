"""Bodies of requests: read within limits of bytes and time, admitted in turn, dropped once their client has gone."""

from __future__ import annotations

import asyncio
import io
import math
import re
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmrm.errors import VlmrmError
from vlmrm.serving.backend import QueueAway
from vlmrm.serving.errors import InvalidRequest, SlowBody, TimedOut, response_to
from vlmrm.serving.event_loop import LANE, RequestContext, TurnScheduler, begin_request, current_request
from vlmrm.serving.service import TooLarge
from vlmrm.serving.settings import Limits
from vlmrm.serving.telemetry import Metrics
from vlmrm.serving.tokens import client_of
from vlmrm.serving.worker_spec import DIGITS

REVISION_HEADER = b"x-vlmrm-revision"  # in a request the one that it demands, in an answer those that computed it
METHODS = ("POST", "PUT", "PATCH", "DELETE")  # that have a body
IDLE_S = 15.0  # between two pieces of a body
LASTING = 1 / 2  # of `max_wait`, once the queue has lasted so long: a burst ends, while overload would keep it full
SMALL_BYTES, FEW_VALUES = 64 * 2**10, 1000
ENDS = 512  # bytes at both ends of a body in which its reward is looked for
MODEL = re.compile(rb'"(?:model|reward)"\s*:\s*"([^"\\]{1,100})"')


class Busy(QueueAway):
    """The service itself has more requests than it can answer in time."""


class ClientGone(Exception):
    """The client has disconnected: nobody waits for an answer."""


class BodyMiddleware:
    """Reads the body of a request, waits for the request's turn, and runs its handler while the client is there.

    A body is counted in bytes, in those of all bodies in memory, and in time. A request is refused before it is
    parsed where it would wait longer than `max_wait` for its turn. A handler whose client has disconnected is
    cancelled, which servers do not do; `Gateway.score` then cancels the job, unless other requests wait for it.

    Args:
        results: paths that ask for results, and wait for no turn: refused, they would come again, and their results
            be computed for nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        scheduler: TurnScheduler,
        metrics: Metrics,
        results: Sequence[str] = (),
    ):
        self.app, self.limits, self.scheduler, self.metrics = app, limits, scheduler, metrics
        self.results = results
        self._bytes = 0  # of bodies in memory: what is announced costs its sender nothing, and may never come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in METHODS:
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        held = _Held(self)
        try:
            context = RequestContext(client_of(scope), _deadline(headers), wanted=_wanted(headers))
            begin_request(context)
            body = await self._read(receive, held)
            await _Handling(self, context, scope, receive, send).run(body)
        except ClientGone:
            self.metrics.disconnects.inc()
        except VlmrmError as error:
            await response_to(error)(scope, receive, send)
        finally:
            held.release()

    async def _read(self, receive: Receive, held: _Held) -> bytes:
        """Return the whole body."""
        body = io.BytesIO()  # grows in place, while a join of 200 MB would stop the event loop
        end = min(time.monotonic() + self.limits.body_timeout, current_request().deadline)
        while True:
            try:
                async with asyncio.timeout(min(max(end - time.monotonic(), 0.001), IDLE_S)):
                    message = await receive()
            except TimeoutError:
                raise SlowBody(
                    f"the body did not come in {self.limits.body_timeout:g} s, with at most {IDLE_S:g} s between two "
                    "pieces of it: send it faster, or in parts."
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            body.write(message.get("body", b""))
            if body.tell() > self.limits.max_body_bytes:
                raise too_large(self.limits)
            held.grow_to(body.tell())
            if not message.get("more_body", False):
                return body.getvalue()

    def admit(self, lane: str) -> None:
        """Raise Busy where a request of this lane would wait too long: in a burst, or while a queue lasts."""
        wait, limit = self.scheduler.wait(lane), self.limits.max_wait
        if wait > (limit if self.scheduler.standing() < limit else limit * LASTING):
            raise Busy(f"the service is busy for the next {wait:.1f} s: try again later.", wait)


class _Held:
    """The bytes of one body in the middleware's count."""

    def __init__(self, middleware: BodyMiddleware):
        self._middleware = middleware
        self._bytes = 0

    def grow_to(self, size: int) -> None:
        limit, more = self._middleware.limits.max_bodies_bytes, size - self._bytes
        if self._middleware._bytes + more > limit:
            raise Busy(f"the bodies of all requests together are over the limit of {limit} bytes: try again later.")
        self._middleware._bytes += more
        self._bytes = size

    def release(self) -> None:
        self._middleware._bytes -= self._bytes
        self._bytes = 0


class _Handling:
    """Handle one request after its body has come: take its turn, and end the handler with its client."""

    def __init__(
        self, middleware: BodyMiddleware, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ):
        self._context = context
        self._middleware, self._scope, self._receive, self._send = middleware, scope, receive, send
        self._answered = self._disconnected = False
        self._body: bytes | None = None

    async def run(self, body: bytes) -> None:
        self._body = body
        lane = f"{self._context.client} {self._scope['path']} {_reward_in(body)}"
        LANE.set(lane)
        self._context.body_bytes = len(body)
        self._context.is_small = len(body) < SMALL_BYTES and body.count(b",") < FEW_VALUES
        waits = self._scope["path"] not in self._middleware.results
        if waits:
            self._middleware.admit(lane)
        handler = asyncio.current_task()
        assert handler is not None
        watching = asyncio.create_task(self._watch(handler))
        try:
            if waits:
                await self._middleware.scheduler.next_turn()
            if time.monotonic() > self._context.deadline:
                raise TimedOut(
                    "the deadline of the request had passed before its turn came: ask again, with more time."
                )
            await self._middleware.app(self._scope, self._replay(watching), self._note)
        except asyncio.CancelledError:
            if not self._disconnected:
                raise
            handler.uncancel()
            raise ClientGone from None
        finally:
            watching.cancel()

    async def _watch(self, handler: asyncio.Task[object]) -> Message:
        message = await self._receive()  # the body has been read: only a disconnect can come
        if not self._answered:
            self._disconnected = True
            handler.cancel()
        return message

    def _replay(self, watching: asyncio.Task[Message]) -> Receive:
        async def receive() -> Message:
            if self._body is None:
                return await asyncio.shield(watching)
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}

        return receive

    async def _note(self, message: Message) -> None:
        self._answered = self._answered or not message.get("more_body", message["type"] == "http.response.start")
        if message["type"] == "http.response.start" and self._context.revisions:
            header = (REVISION_HEADER, ", ".join(sorted(set(self._context.revisions.values()))).encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await self._send(message)


def too_large(limits: Limits) -> TooLarge:
    return TooLarge(f"the body is over the limit of {limits.max_body_bytes} bytes: send fewer items at a time.")


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
        raise InvalidRequest(
            f"the header X-Vlmrm-Revision is no revision, {DIGITS} hexadecimal digits: GET /v1/models has those that "
            "are served."
        )
    return text


def _reward_in(body: bytes) -> str:
    """Return the reward that a JSON body seems to name; only the order of turns depends on it."""
    match = MODEL.search(body[:ENDS]) or MODEL.search(body[-ENDS:])
    return match[1].decode("latin-1") if match else ""
