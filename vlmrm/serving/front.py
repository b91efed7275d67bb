"""The front: who asks, what is refused unhandled, whose turn it is, and a line in the log for each answer."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import math
import re
import signal
import socket
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import uvloop
from prometheus_client import generate_latest

from vlmrm.errors import VlmrmError
from vlmrm.serving import errors
from vlmrm.serving.clients import Client, Clients
from vlmrm.serving.errors import Busy, Forbidden, InvalidRequest, NotServing, TimedOut, TooLarge, Unauthorized
from vlmrm.serving.http_server import HEADER_BYTES, Headers, HttpRequest, listening
from vlmrm.serving.links import Link, LinkLost
from vlmrm.serving.settings import LOOPBACK, Limits, ServiceSettings
from vlmrm.serving.telemetry import RequestMetrics, log_lines
from vlmrm.serving.worker.channel import die_with_parent
from vlmrm.serving.worker_spec import DIGITS

logger = logging.getLogger("vlmrm")

CLIENT_ID = re.compile(r"[\w.\-]{1,64}", re.ASCII)
# Any other name in Host, on a service without tokens, is of a web page that had its own name resolved to this machine
# (DNS rebinding). An address cannot be rebound.
LOCAL_NAME = re.compile(r"(localhost|[\w\-.]+\.localhost|[\d.]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
OPEN = ("/health", "/ready")
OPERATORS = "/v1/rewards/"  # begins the addresses that only the operator's token opens
RESULTS = ("/api/reward/pull",)  # asks for what has been accepted: refused, it would come again
QUIET = ("/health", "/ready", "/metrics", "/v1/status")  # polled every few seconds: logged at the level of debugging
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]  # of every answer
REVISION_HEADER = b"x-vlmrm-revision"  # in a request the one that it demands, in an answer those that computed it
METHODS = ("POST", "PUT", "PATCH", "DELETE")  # that have a body
DRAIN_S = 10.0  # for answers whose scores are there
TRIES = 3  # handlers that may die with one request: those that were killed together do
LARGE_BYTES = 2**20  # of a body that only the last handler takes, so that small ones never wait behind it
REFUSALS_S = 1.0  # between two lines of the log about requests with a 503
HEALTHY = json.dumps({"status": "ok"}).encode()


class Front:
    """All requests between their connection and a handler."""

    def __init__(self, settings: ServiceSettings):
        self.settings, self.limits = settings, settings.limits
        self.rewards = {reward.name for reward in settings.reward_args}
        self.metrics = RequestMetrics()
        self.admission = Admission(self.limits)
        self.handlers: list[Handler] = []
        self._answers: dict[HttpRequest, asyncio.Future[Any]] = {}  # to requests that a handler has
        self.clients = Clients(settings)
        self._refused, self._logged = 0, -math.inf  # requests with a 503 that have no line in the log, the last's time

    # Of connections

    def begin(self, request: HttpRequest) -> None:
        """Find out who asks, and refuse what can be refused by its head."""
        headers = request.named
        sent = headers.get(b"x-request-id", b"").decode("latin-1")
        request.id = sent if CLIENT_ID.fullmatch(sent) else uuid.uuid4().hex
        try:
            self._check_head(request, headers)
        except VlmrmError as error:
            self.fail(request, error)

    def grow(self, request: HttpRequest, size: int) -> None:
        try:
            self.admission.grow(request, size)
            if len(request.body) > self.limits.max_body_bytes:
                raise self._too_large()
        except VlmrmError as error:
            self.fail(request, error)

    def handle(self, request: HttpRequest) -> None:
        """Have a request that has come as a whole take its turn."""
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            self._answer(request, 200, [(b"content-type", b"application/json")], HEALTHY, "/health")
            return
        request.lane = request.client.lane(request.path, request.body)
        try:
            self.admission.push(request, refusable=request.method in METHODS and request.path not in RESULTS)
        except VlmrmError as error:
            self.fail(request, error)
            return
        self.pump()

    def fail(self, request: HttpRequest, error: VlmrmError) -> None:
        status, headers, body = errors.error_answer(error)
        self._answer(request, status, [(name.encode(), value.encode()) for name, value in headers], body)

    def gone(self, request: HttpRequest) -> None:
        self.metrics.disconnects.inc()
        if (answer := self._answers.get(request)) is not None:
            answer.cancel()
        self._note(request, 0, "other")

    # Of handlers

    def free(self, request: HttpRequest) -> Handler | None:
        """Return a handler that has room."""
        places = self.handlers[-1:] if len(request.body) > LARGE_BYTES else self.handlers
        return next((one for one in places if one.working is None), None)

    def pump(self) -> None:
        """Give the next requests to handlers that have room."""
        while (request := self.admission.pop(self.free)) is not None and (handler := self.free(request)) is not None:
            if time.monotonic() > request.deadline:
                late = "the deadline of the request passed before its turn came: ask again, with more time."
                self.fail(request, TimedOut(late))
                continue
            if request.path == "/metrics":  # the handler adds the core's
                request.body = bytearray(generate_latest(self.metrics.registry))
            answer = self._answers[request] = handler.handle(request)
            answer.add_done_callback(partial(self._answered, request))

    def _answered(self, request: HttpRequest, answer: asyncio.Future[Any]) -> None:
        """Answer as a handler says; another one takes the request of a handler that has died."""
        del self._answers[request]
        if answer.cancelled():
            return
        try:
            said = answer.result()
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in said["headers"]]
            self._answer(request, said["status"], headers, said["body"], said["route"])
        except VlmrmError as error:
            self.fail(request, error)
        except LinkLost:
            request.tries += 1
            if request.tries > TRIES or request.path.startswith(OPERATORS):
                self.fail(request, NotServing("the process that handled the request has ended: ask again."))
            else:  # what was queued for it is shared
                self.admission.push(request, refusable=False)
                self.pump()

    async def drain(self) -> None:
        """Wait until requests that have come have their answers."""
        if self._answers:
            await asyncio.wait(self._answers.values(), timeout=DRAIN_S)

    # Answers

    def _answer(self, request: HttpRequest, status: int, headers: Headers, body: bytes, route: str = "other") -> None:
        if not request.is_open:
            return
        self._note(request, status, route)
        request.answer(status, [*headers, (b"x-request-id", request.id.encode()), *HEADERS], body)

    def _note(self, request: HttpRequest, status: int, route: str) -> None:
        """Count an answer, and write a line about it; the status is 0 where the client had gone."""
        self.admission.shrink(request)
        seconds = time.monotonic() - request.arrived
        # Not the path of the request: clients could fill metrics and logs with paths that do not exist.
        self.metrics.requests.labels(request.client.label, route, str(status)).inc()
        self.metrics.request_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if route in QUIET and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        client = request.client.name or "unknown"
        fields: dict[str, object] = {"client": client, "method": request.method[:16], "route": route}
        fields |= {"status": status, "ms": round(1000 * seconds, 1)}
        if status == 503:  # a flood of them would cost more to log than to refuse
            self._refused += 1
            if (now := time.monotonic()) - self._logged < REFUSALS_S:
                return
            fields["refused"] = self._refused  # since the last such line
            self._refused, self._logged = 0, now
        logger.log(level, "request", extra={"fields": {**fields, "request_id": request.id}})

    # Refusals

    def _check_head(self, request: HttpRequest, headers: dict[bytes, bytes]) -> None:
        """Raise the error of a request that is refused before a byte of its body is read."""
        method, path = request.method, request.path
        client = self.clients.identify(headers, request.connection.peer)
        if client is None and path not in OPEN:
            raise Unauthorized
        client = request.client = client or request.client
        request.deadline = _deadline(headers)
        request.ends = min(request.arrived + self.limits.body_timeout, request.deadline)
        name, slash, _ = path[1:].partition("/")
        # Where the reward is named in the body, the route checks that the client opens it.
        closed = slash and name in self.rewards and name not in client.rewards
        if closed or not (client.rewards or path in OPEN or path.startswith(OPERATORS)):
            raise Unauthorized
        _check_read(request, headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.max_body_bytes:
            raise self._too_large()
        if method == "POST" and headers.get(b"sec-fetch-site") == b"cross-site":
            message = "the request comes from a web page of another site: only the service's own page may send it."
            raise InvalidRequest(message, 403)
        nameless = b"host" not in headers and request.version == "1.0"  # which no browser speaks
        if self.clients.open and not (nameless or LOCAL_NAME.fullmatch(headers.get(b"host", b"").decode("latin-1"))):
            names = ", ".join(LOOPBACK)
            message = f"the Host header is none of this machine's names, {names}: use one, or set VLMRM_TOKEN."
            raise InvalidRequest(message, 421)
        if path.startswith(OPERATORS):
            self._require_admin(client)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the body is over the limit of {self.limits.max_body_bytes} bytes: send fewer items at a time."
        )

    def _require_admin(self, client: Client) -> None:
        """Raise Unauthorized unless a client is the operator, Forbidden where nobody is."""
        if not self.settings.admin_token.get_secret_value():
            raise Forbidden("this service lets nobody change its models: set VLMRM_ADMIN_TOKEN, and send that token.")
        if not client.admin:
            raise Unauthorized


def _check_read(request: HttpRequest, headers: dict[bytes, bytes]) -> None:
    """Raise InvalidRequest for a request with a part that would not be read."""
    size = len(request.path) + len(request.query) + sum(map(len, itertools.chain(*request.headers)))
    if size > HEADER_BYTES:
        raise InvalidRequest(f"address and headers are {size} bytes, over the limit of {HEADER_BYTES}.", 431)
    if request.method not in METHODS:
        return
    if request.query:
        name = request.query.partition(b"=")[0][:40].decode("latin-1")
        raise InvalidRequest(f"?{name} of the address would not be read: put it into the body.")
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() not in ("", "identity"):
        raise InvalidRequest(f"the body has the Content-Encoding {coding[:40]}: send it as it is.", 415)
    if b"upgrade" in headers and b"upgrade" in headers.get(b"connection", b"").lower():
        protocol = headers[b"upgrade"].decode("latin-1")[:40]
        raise InvalidRequest(f"the request asks for an upgrade to {protocol}: send it in HTTP/1.1 alone.")
    wanted = headers.get(REVISION_HEADER, b"").decode("latin-1")
    if wanted and not re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", wanted):
        shape = f"X-Vlmrm-Revision is no revision, {DIGITS} hexadecimal digits"
        raise InvalidRequest(f"{shape}: GET /v1/models has them.")


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


class Handler(Link):
    """A handler that has connected, `working` on a request until that waits for something else, or is answered."""

    def __init__(self, front: Front):
        super().__init__(told=lambda message: self._released(message["release"]))
        self._front, self._number = front, 0
        self.working: int | None = 0  # the number of the request; 0 until it is ready

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._front.handlers.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.handlers.remove(self)
        super().connection_lost(exc)

    def handle(self, request: HttpRequest) -> asyncio.Future[Any]:
        number = self._number = self.working = self._number + 1
        answer = self.ask({"number": number, **write_request(request)})
        answer.add_done_callback(lambda _: self._released(number))
        return answer

    def _released(self, number: int) -> None:
        if number == self.working:
            self.working = None
            self._front.pump()


def write_request(request: HttpRequest) -> dict[str, Any]:
    """Return a request as a handler gets it; the moments are of a clock that all processes share."""
    return {
        "id": request.id,
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": b"\0".join(part for pair in request.headers for part in pair),
        "body": request.body,
        "client": asdict(request.client),
        "peer": request.connection.peer,
        "arrived": request.arrived,
        "deadline": None if request.deadline == math.inf else request.deadline,
    }


# Whose turn it is ----------------------------------------------------------------------------------------------------

# A request waits in the lane of its client and reward. It is refused where it would wait longer than `max_wait` by the
# pace of handlers: how many may be in flight follows from what the machine can do now.

SMOOTHING = 0.05  # of the seconds of a turn: the weight of the latest
LASTING = 1 / 2  # of `max_wait`, once the queue has lasted so long: a burst ends, while overload would keep it full


@dataclass
class _Lane:
    weight: float
    tag: float  # the virtual time of its next turn
    waiting: deque[HttpRequest] = field(default_factory=deque)


class Admission:
    """The requests that wait for a handler, lane after lane by weight, and the bytes of bodies by client."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._lanes: dict[str, _Lane] = {}
        self._clock = 0.0  # the virtual time: the tag of the lane that was served last
        self.waiting = 0
        self._turn_s = 0.0  # seconds between two turns while requests wait
        self._last: float | None = None  # when the last turn was, while requests wait
        self._since = 0.0  # when a request began to wait while no other did
        self._held: dict[str, int] = defaultdict(int)  # bytes by client
        self._weights: dict[str, float] = {}  # of these clients

    def push(self, request: HttpRequest, *, refusable: bool = True) -> None:
        """Have a request wait for its turn; raises Busy where that would take too long."""
        wait, limit = self.wait(request), self._limits.max_wait
        now = time.monotonic()
        lasted = now - self._since if self.waiting else 0.0
        if refusable and wait > (limit if lasted < limit else limit * LASTING):
            raise Busy(f"the service is busy for the next {wait:.1f} s: try again later.", wait)
        if not self.waiting:
            self._since = self._last = now
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = _Lane(request.client.weight, self._clock)
        lane.waiting.append(request)
        self.waiting += 1

    def pop(self, free: Callable[[HttpRequest], object]) -> HttpRequest | None:
        """Return the request whose turn it is, of those for which something is `free`; None where there is none."""
        while True:
            lanes = [(lane.tag, name) for name, lane in self._lanes.items() if free(lane.waiting[0]) is not None]
            if not lanes:
                return None
            _, name = min(lanes)
            lane = self._lanes[name]
            request = lane.waiting.popleft()
            self.waiting -= 1
            self._clock = lane.tag
            lane.tag += 1 / lane.weight
            if not lane.waiting:
                del self._lanes[name]
            if request.is_open:  # else its client has gone
                now = time.monotonic()
                if self._last is not None:
                    self._turn_s += SMOOTHING * (now - self._last - self._turn_s)
                self._last = now if self.waiting else None
                return request

    def wait(self, request: HttpRequest) -> float:
        """Return about how many seconds a request would wait for its turn."""
        lane = self._lanes.get(request.lane)
        before = 1 + (len(lane.waiting) if lane is not None else 0)
        others = sum(one.weight for name, one in self._lanes.items() if name != request.lane)
        return self._turn_s * min(before * (1 + others / request.client.weight), self.waiting + 1)

    def grow(self, request: HttpRequest, size: int) -> None:
        """Count bytes of a body; raises Busy where all are too many, and its client has more than its share."""
        client, most = request.client.name, self._limits.max_bodies_bytes
        self._held[client] += size
        request.held += size
        self._weights[client] = request.client.weight
        if sum(self._held.values()) > most and self._held[client] > most * request.client.weight / sum(
            self._weights.values()
        ):
            raise Busy(f"the bodies of all requests together are over the limit of {most} bytes: try again later.")

    def shrink(self, request: HttpRequest) -> None:
        """Forget the body of a request."""
        client = request.client.name
        self._held[client] -= request.held
        request.held = 0
        if self._held[client] <= 0:
            del self._held[client]
            self._weights.pop(client, None)


# Its process ---------------------------------------------------------------------------------------------------------


async def run(settings: ServiceSettings, control: socket.socket, listener: socket.socket) -> None:
    """Serve until SIGTERM; over `control` come sockets to handlers. Requests that have come have their answers."""
    front, loop, stopping = Front(settings), asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    log_lines(settings)
    joining = set[asyncio.Task[Any]]()

    def take() -> None:
        _, files, *_ = socket.recv_fds(control, 1, 1)
        for file in files:
            link = loop.create_unix_connection(partial(Handler, front), sock=socket.socket(fileno=file))
            joining.add(task := loop.create_task(link))
            task.add_done_callback(joining.discard)

    loop.add_reader(control, take)
    async with listening(front, listener):
        await stopping.wait()
    await front.drain()


if __name__ == "__main__":
    die_with_parent()
    gc.freeze()  # what was imported is never looked at again
    start = json.load(sys.stdin)
    uvloop.run(
        run(ServiceSettings.model_validate(start["settings"]), *(socket.socket(fileno=int(it)) for it in sys.argv[1:]))
    )
