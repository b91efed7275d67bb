"""The process `vlmrm serve`: its ready line, its end, and connections that would keep it waiting."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from services import HERE

from vlmrm.errors import ConfigError
from vlmrm.serving.server import listen
from vlmrm.serving.worker.channel import pack
from vlmrm.serving.worker_process import WORKER

PROGRAM = """
import sys
import vlmrm.serving.connection as connection
connection.HEADER_S, connection.HEADER_BYTES = 0.3, 2000
from pathlib import Path
from vlmrm.serving.command import serve
serve(Path(sys.argv[1]), None, {})
"""


@contextmanager
def served(
    folder: Path, *settings: str, engine: str = "fake_reward.Length", **options: Any
) -> Generator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address, and the lines that it logged until it was ready."""
    lines = [*settings, "port = 0", "[[reward_args]]", 'reward_type = "length"', f'engine = "{engine}"']
    lines += [
        f"import_from = [{HERE!r}]",
        *(["[reward_args.options]"] if options else []),
        *(f"{name} = {value!r}" for name, value in options.items()),
    ]
    (folder / "service.toml").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": str(Path(HERE).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "service.toml"],
        cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        logged = lines_until(process, "is ready")
        [url] = re.findall(r"http://\S+?(?=[\s\"])", "".join(logged))
        yield process, url, logged
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # ty: ignore


def lines_until(process: subprocess.Popen[str], what: str) -> list[str]:
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if what in line:
            return lines
    raise AssertionError("".join(lines))


def gone(process_id: int) -> bool:
    """Whether a process ends within ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        select.select([], [], [], 0.02)
    return False


def worker_of(lines: list[str]) -> int:
    return int(re.findall(r"is ready \(process (\d+)\)", lines[-1])[0])


def post(url: str, prompt: str) -> socket.socket:
    """A connection on which a request was sent."""
    body = json.dumps({"items": [{"prompt": prompt}]})
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=20)
    head = "POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def answer(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


@pytest.mark.slow
def test_it_says_once_that_it_is_ready_and_finishes_what_it_accepted(tmp_path):
    with served(tmp_path, seconds=0.5) as (process, url, logged):
        assert len([line for line in logged if f"Serving length on {url}" in line]) == 1
        httpx.get(f"{url}/health").raise_for_status()
        connection = post(url, "aaa")
        while "vlmrm_queue_jobs" not in (text := httpx.get(f"{url}/metrics").text) or 'stage="waiting"' not in text:
            pass  # until a worker has it
        process.send_signal(signal.SIGTERM)
        assert b'"score":3.0' in answer(connection)
        assert process.wait(20) == -signal.SIGTERM
        assert gone(worker_of(logged))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_and_its_workers(tmp_path, kind):
    with served(tmp_path) as (process, url, logged):
        connection = post(url, "hang")
        process.send_signal(kind)
        lines_until(process, "a second signal ends it at once")
        process.send_signal(kind)
        assert process.wait(5) == 128 + kind
        assert gone(worker_of(logged))
        connection.close()


@pytest.mark.slow
def test_a_worker_does_not_outlive_a_killed_service(tmp_path):
    with served(tmp_path) as (process, url, logged):
        post(url, "hang").close()
        process.kill()
        assert gone(worker_of(logged))


def test_a_worker_whose_service_goes_while_it_loads_ends_quietly():
    ours, theirs = socket.socketpair()
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
    ours.sendall(pack({"engine": "fake_reward.Length", "options": {}, "path": [HERE]}))
    ours.close()
    _, said = worker.communicate(timeout=20)
    assert (worker.returncode, said) == (0, b"")


@pytest.mark.slow
def test_connections_that_dawdle_or_babble_are_closed_and_others_are_answered(tmp_path):
    with served(tmp_path, 'log_format = "json"') as (_, url, logged):
        assert json.loads(logged[0])["message"].startswith("Serving length on http://127.0.0.1:")
        address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        silent, slow, large = (socket.create_connection(address, timeout=10) for _ in range(3))
        slow.sendall(b"POST /v1/rewards HTTP/1.1\r\nHost: localho")
        large.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 3000)
        assert b"400 Bad Request" in answer(large)
        assert answer(silent) == answer(slow) == b""
        kept = socket.create_connection(address, timeout=10)
        for _ in range(2):
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += kept.recv(65536) or pytest.fail("the connection was closed")
        kept.sendall(b"GET /health HT")
        assert answer(kept) == b""
        for junk in (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * 1000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(junk)
                assert b" 200 " not in answer(connection)
        assert httpx.get(f"{url}/health").status_code == 200


def test_addresses_that_cannot_be_listened_at_are_said_in_a_sentence():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use: choose another with --port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host 192\.0\.2\.1 is no address of this machine"):
        listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="host no such host cannot be resolved"):
        listen("no such host", 0)
