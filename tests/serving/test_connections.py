"""Connections at the limit of open files, bodies that are refused, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import weakref
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
from services import eventually, in_loop
from test_server import post, served

from vlmrm.serving import server
from vlmrm.serving.server import HeaderLimitProtocol


def test_the_soft_limit_of_open_files_becomes_the_hard_one(monkeypatch):
    limits = {"now": (256, 3000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    for before, after in (((256, 3000), 3000), ((256, 10**9), 65_536), ((256, -1), 65_536), ((-1, -1), -1)):
        limits["now"] = before
        server.raise_file_limit()
        assert limits["now"] == (after, before[1])


def test_silent_connections_take_no_room_either(tmp_path):
    with served(tmp_path, files=400) as (_, url, _), ExitStack() as opened:
        address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        waiting = post(url, "aaa")
        for _ in range(500):
            opened.enter_context(socket.create_connection(address, timeout=300))
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=300).status_code == 200
        assert post(url, "aaaa").recv(12) == waiting.recv(12) == b"HTTP/1.1 200"


class Sink(asyncio.Transport):
    """A connection without a network: what was written, and whether it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closing, self.aborted = b"", False, False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def connected(app: Any) -> tuple[HeaderLimitProtocol, Sink]:
    config = server.uvicorn.Config(app, log_config=None)
    protocol, sink = HeaderLimitProtocol(config, server.uvicorn.server.ServerState(), {}), Sink()
    protocol.connection_made(sink)
    return protocol, sink


@in_loop
async def test_a_body_that_is_refused_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(server, "DISCARDED_BYTES", 1000)

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    protocol, sink = connected(refuse)
    protocol.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n\r\n")
    await eventually(lambda: b"401" in sink.written)
    protocol.data_received(b"x" * 1000)
    assert not sink.closing  # its sender can still read the answer
    protocol.data_received(b"x")
    assert sink.closing
    protocol.connection_lost(None)


@in_loop
async def test_a_client_that_does_not_read_its_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(server, "WRITE_S", 0.01)
    protocol, sink = connected(None)
    protocol.pause_writing()
    protocol.resume_writing()
    await asyncio.sleep(0.1)
    assert not sink.aborted  # it read in time
    protocol.pause_writing()
    await eventually(lambda: sink.aborted)
    protocol.connection_lost(None)


@in_loop
async def test_a_connection_that_has_ended_leaves_no_garbage():
    """Full collections are rare in a service, so a cycle for each connection would fill its memory."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    config, ended = server.uvicorn.Config(answer, log_config=None), []
    state = server.uvicorn.server.ServerState()

    def protocol() -> HeaderLimitProtocol:
        made = HeaderLimitProtocol(config, state, {})
        ended.append(weakref.ref(made))
        return made

    listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    address = listener.sockets[0].getsockname()
    gc.collect()
    gc.disable()
    try:
        transports = sum(issubclass(type(it), asyncio.Transport) for it in gc.get_objects())
        for _ in range(10):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"{}")
            writer.close()
            await writer.wait_closed()
        del reader, writer
        await eventually(lambda: not state.connections)
        await asyncio.sleep(0.01)
        assert [reference() for reference in ended] == [None] * 10
        # Of those that are left each is of a client here, which asyncio itself leaves to the collector.
        assert sum(issubclass(type(it), asyncio.Transport) for it in gc.get_objects()) - transports <= 10
    finally:
        gc.enable()
        listener.close()


@in_loop
async def test_a_body_in_thousands_of_tiny_chunks_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(server, "PIECES", 100)

    async def answer(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    for chunk, status in ((b"1\r\nx\r\n", b"400"), (b"64\r\n%s\r\n" % bytes(100), b"200")):
        protocol, sink = connected(answer)
        protocol.data_received(head + chunk * 200 + b"0\r\n\r\n")
        while not sink.written:
            await asyncio.sleep(0)
        assert sink.written.startswith(b"HTTP/1.1 " + status)
        assert sink.closing == (status == b"400")
        if sink.closing:
            assert json.loads(sink.written.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(
                "the body came in over 100 pieces of 1 bytes on average"
            )
        protocol.connection_lost(None)


@in_loop
async def test_requests_before_an_answer_are_all_answered_but_not_read_ahead():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    protocol, sink = connected(answer)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
    states = []
    while sink.written.count(b"200 OK") < 3:
        await asyncio.sleep(0)
        states.append((sink.written.count(b"200 OK"), protocol.flow.read_paused))
    assert (1, True) in states and (1, False) not in states and states[-1] == (3, False)
    protocol.connection_lost(None)
