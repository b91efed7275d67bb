"""HTTP/1.1 connections, parsed by httptools: a head within limits, a body as it comes, one request at a time."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import socket
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property, lru_cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools

from vlmrm.errors import VlmrmError
from vlmrm.serving.clients import Client
from vlmrm.serving.errors import InvalidRequest, SlowBody

if TYPE_CHECKING:
    from vlmrm.serving.front import Front

HEADER_BYTES = 64 * 2**10  # of a request, its address among them
HEADER_S = 15.0
IDLE_S = 15.0  # between two pieces of a body
# Clients' pools keep connections for up to a minute; the client should be the one that closes first.
KEEP_ALIVE_S = 75.0
WRITE_S = 60.0  # for a client to take some of its answer
PIECES, PIECE_BYTES = 4096, 64  # of a body: that many may be shorter on average
DISCARDED_BYTES = 16 * 2**20  # of a refused body, so that its sender can read the answer before it is cut off
READ_BYTES = 64 * 2**10  # at a time; asyncio's own is 256 KiB
ACCEPTED = 16  # connections in one round of the event loop, which many would hold up
BACKLOG = 2048
RESERVED_FILES = 192  # of the process's open files, for handlers
GC_THRESHOLDS = (700, 10, 10_000)  # Python's own, but full collections a thousand times rarer

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(eq=False)
class HttpRequest:
    """A request, `headers` with names in lower case; `body` grows as it comes. The front fills the last fields."""

    connection: Connection
    method: str
    path: str
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    arrived: float = field(default_factory=time.monotonic)
    body: bytearray = field(default_factory=bytearray)
    is_open: bool = True  # its client waits, and has had no answer
    id: str = ""
    client: Client = field(default_factory=Client)
    lane: str = ""  # of turns
    held: int = 0  # bytes of its body that count
    deadline: float = math.inf  # after which its client waits no longer
    ends: float = math.inf  # when its body must have come
    tries: int = 0  # handlers that have died with it

    @cached_property
    def named(self) -> dict[bytes, bytes]:
        return dict(self.headers)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer; nothing where the client has gone, or has had an answer."""
        if self.is_open:
            self.is_open = False
            self.connection.answer(self, status, headers, body)


class Connection(asyncio.Protocol):
    """A connection, closed when a head or a body takes too long, or its client does not read its answer."""

    def __init__(self, front: Front, connections: set[Connection], limit: int):
        self._front, self._connections, self._limit = front, connections, limit
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the connection is closed, or the request that is being read
        self._request: HttpRequest | None = None  # that is being read or answered
        self._keeps = True  # the connection, after this request
        self._whole = False  # the request has come to its end
        self._target, self._fields = b"", list[tuple[bytes, bytes]]()
        self._head = self._discarded = self._pieces = 0
        self._writing: asyncio.TimerHandle | None = None
        self.idle_since = math.inf  # inf while a request is answered

    # Of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES  # ty: ignore[invalid-assignment]
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else ""
        self._connections.add(self)
        self._parser = httptools.HttpRequestParser(self)
        self._wait_for_head(HEADER_S)
        if len(self._connections) > self._limit:
            self._close_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for timer in (self._timer, self._writing):
            if timer is not None:
                timer.cancel()
        request, self._request = self._request, None
        if request is not None and request.is_open:
            request.is_open = False
            self._front.gone(request)

    def data_received(self, data: bytes) -> None:
        if self._whole:  # the next request, before the answer to this one: its client sends it again
            self._keeps = False
            return
        self._head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._keeps = False  # the front refuses it
        except httptools.HttpParserError:
            self._fail(InvalidRequest("what came is no request of HTTP/1.1: send one."))
        if self._request is None and self._head > HEADER_BYTES:
            limit = f"over the limit of {HEADER_BYTES} bytes"
            self._fail(InvalidRequest(f"the headers are {limit}: send fewer, or shorter ones."))

    def pause_writing(self) -> None:
        self._writing = self._loop.call_later(WRITE_S, self._transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # Of httptools

    def on_message_begin(self) -> None:
        if self._request is not None:  # the next one, in the same piece as the end of this
            self._keeps = False
            return
        self._target, self._fields = b"", []
        self._expect(HEADER_S)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._request is not None:
            return
        parser = self._parser
        method, version = parser.get_method().decode("latin-1"), parser.get_http_version()
        self._keeps, self._whole = parser.should_keep_alive() and version != "1.0", False
        self._discarded, self._pieces, self.idle_since = 0, 0, math.inf
        self._request = request = HttpRequest(self, method, "", b"", version, self._fields)
        try:
            url = httptools.parse_url(self._target)
        except httptools.HttpParserInvalidURLError:
            self._fail(InvalidRequest("the address is no URL: send one."))
            return
        request.path, request.query = unquote((url.path or b"").decode("latin-1")), url.query or b""
        self._front.begin(request)
        self._expect(min(IDLE_S, request.ends - self._loop.time()))
        if request.is_open and request.named.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        request = self._request
        if request is None or self._whole:
            return
        if not request.is_open:
            self._discarded += len(data)
            if self._discarded > DISCARDED_BYTES:
                self.close()
            return
        request.body += data
        self._pieces += 1
        if self._pieces > PIECES and len(request.body) < PIECE_BYTES * self._pieces:
            came = f"over {PIECES} pieces of {len(request.body) / self._pieces:.0f} bytes on average"
            self._fail(InvalidRequest(f"the body came in {came}: send it with a Content-Length, or in larger chunks."))
            return
        self._due = min(self._loop.time() + IDLE_S, request.ends)
        self._front.grow(request, len(data))

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._whole:
            return
        self._whole = True
        self._due = math.inf
        if request.is_open:
            self._front.handle(request)
        else:
            self._end()

    # Answers

    def answer(self, request: HttpRequest, status: int, headers: Headers, body: bytes) -> None:
        """Write the answer to the request that is being read or handled."""
        if not self._whole:
            self._keeps = False  # the rest of it is thrown away
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, _phrase(status))]
        lines += [b"%s: %s\r\n" % header for header in headers]
        lines.append(b"date: %s\r\ncontent-length: %d\r\n" % (_date(int(time.time())), len(body)))
        lines.append(b"\r\n" if self._keeps else b"connection: close\r\n\r\n")
        if request.method != "HEAD":
            lines.append(body)
        self._transport.write(b"".join(lines))
        request.body = bytearray()
        if self._whole:
            self._end()

    def _end(self) -> None:
        """End a request that has come as a whole and has its answer."""
        self._request, self._whole = None, False
        if not self._keeps:
            self.close()
            return
        self._wait_for_head(KEEP_ALIVE_S)

    def _fail(self, error: VlmrmError) -> None:
        """Answer what is no request, and close."""
        self._keeps = False
        if self._request is None:
            self._request = HttpRequest(self, "", "", b"", "1.1", [])
        if self._request.is_open:
            self._front.fail(self._request, error)
        self.close()

    # Time

    def _wait_for_head(self, seconds: float) -> None:
        self._head = 0
        self.idle_since = self._loop.time()
        self._expect(seconds)

    def _expect(self, seconds: float) -> None:
        """Close the connection after so many seconds, unless something else is expected before."""
        self._due = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() < self._due:
            if self._due < math.inf:
                self._timer = self._loop.call_at(self._due, self._look)
        elif self._request is not None and self._request.is_open:
            most = f"{self._request.ends - self._request.arrived:.3g} s, with {IDLE_S:g} s between two pieces"
            self._fail(SlowBody(f"the body did not come in {most}: send it faster, or in parts."))
        else:
            self.close()

    def _close_idle(self) -> None:
        """Close the connection that waits longest for a request, so that no new one is refused for want of files."""
        others = (one for one in self._connections if one is not self)
        idle = min(others, key=lambda one: one.idle_since, default=self)
        if idle.idle_since < math.inf:
            idle.idle_since = math.inf  # it is closed in the next round: meanwhile others make room
            idle.close()

    def finish(self) -> None:
        """Close the connection once a request that has come has its answer."""
        self._keeps = False
        if self._request is None:
            self.close()

    def close(self) -> None:
        """Close the connection once what has been written is sent."""
        if not self._transport.is_closing():
            self._transport.close()


@lru_cache
def _phrase(status: int) -> bytes:
    return HTTPStatus(status).phrase.encode()


@lru_cache(1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


@asynccontextmanager
async def listening(front: Front, listener: socket.socket) -> AsyncGenerator[set[Connection]]:
    """Accept connections at a socket that listens; yields those that are open, and accepts no more in the end."""
    connections = set[Connection]()
    limit = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES, RESERVED_FILES)
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[Any]]()

    def accept() -> None:
        for _ in range(ACCEPTED):
            try:
                accepted, _ = listener.accept()
            except OSError:  # no other waits, or it has gone
                return
            made = partial(Connection, front, connections, limit)
            tasks.add(task := loop.create_task(loop.connect_accepted_socket(made, accepted)))
            task.add_done_callback(tasks.discard)

    # Not the loop's own server: uvloop's accepts one connection in a round of the loop, and under overload the others,
    # those of /health among them, would wait for seconds.
    listener.setblocking(False)
    loop.add_reader(listener, accept)
    # With thousands of requests a full collection stops the event loop for half a second, for nothing: nearly all
    # garbage of a request is freed by reference counts, or young.
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield connections
    finally:
        loop.remove_reader(listener)
        for connection in list(connections):
            connection.finish()
