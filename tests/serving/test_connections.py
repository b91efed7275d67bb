"""Connections at the limit of open files, bodies that are refused, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Generator
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest
from services import in_loop
from test_server import lines_until, post, served

from vlmrm.serving import server
from vlmrm.serving.connections import raise_open_files
from vlmrm.serving.server import LimitedProtocol

FILES, SILENT = 1024, 1100


@pytest.fixture
def many_files() -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * SILENT:
        pytest.skip("this machine allows too few open files")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_open_files_becomes_the_hard_one(monkeypatch):
    limits = {"now": (256, 3000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    raise_open_files()
    assert limits["now"] == (3000, 3000)


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_silent_connections_at_the_limit_of_open_files_keep_nobody_out(tmp_path):
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
    with served(tmp_path, preexec_fn=few) as (process, url, logged):
        assert any("max_requests is 784 here and not 8192" in line for line in logged)
        address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        waiting = post(url, "aaa")
        silent = [socket.create_connection(address, timeout=300) for _ in range(SILENT)]
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=300).status_code == 200
        assert post(url, "aaaa").recv(12) == waiting.recv(12) == b"HTTP/1.1 200"
        assert "idle connections were closed to make room" in lines_until(process, "closed to make room")[-1]
        for connection in silent:
            connection.close()


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


def connected(app: Any) -> tuple[LimitedProtocol, Sink]:
    config = server.uvicorn.Config(app, log_config=None)
    protocol, sink = LimitedProtocol(config, server.uvicorn.server.ServerState(), {}), Sink()
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
    while b"401" not in sink.written:
        await asyncio.sleep(0)
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
    while not sink.aborted:
        await asyncio.sleep(0.01)
    protocol.connection_lost(None)
