"""The process `vlmrm serve`: its ready line, its end, and connections that would keep it waiting."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.serving.hosts import until
from tests.serving.services import HERE, Gate, in_loop, running
from vlmrm.errors import ConfigError
from vlmrm.serving import http_server
from vlmrm.serving.server import listen, serve


@contextmanager
def served(
    folder: Path, *settings: str, engine: str = "fake_reward.Length"
) -> Generator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address, and the lines that it logged until it was ready."""
    lines = [*settings, "port = 0", "[[reward_args]]", 'reward_type = "length"', f'engine = "{engine}"']
    lines += [f"import_from = [{HERE!r}]"]
    (folder / "service.toml").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": str(Path(HERE).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmrm", "serve", "--config", "service.toml"],
        cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        logged = lines_until(process, "is ready", "Serving")
        [url] = re.findall(r"http://\S+?(?=[\s\"])", "".join(logged))
        yield process, url, logged
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # ty: ignore


def lines_until(process: subprocess.Popen[str], *what: str) -> list[str]:
    """What it logs until all of that has come, in any order."""
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if all(any(one in line for line in lines) for one in what):
            return lines
    raise AssertionError("".join(lines))


def until_gone(process_id: int) -> None:
    def gone() -> bool:
        try:
            return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone, lambda: f"process {process_id} is still there")


def worker_of(lines: list[str]) -> int:
    return int(re.findall(r"is ready \(process (\d+)\)", "".join(lines))[0])


def post(url: str, prompt: str) -> socket.socket:
    """A connection on which a request was sent."""
    body = json.dumps({"items": [{"prompt": prompt}]})
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=300)
    head = "POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def answer(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    received = b""
    with suppress(ConnectionResetError):  # what was sent came after that
        while piece := connection.recv(65536):
            received += piece
    return received


def test_a_path_without_a_model_is_refused_early(tmp_path):
    (tmp_path / "best").mkdir()
    for name, sentence in (
        ("bset", "is no folder: did you mean .*best"),
        ("best", "is no checkpoint, as it has neither"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            serve(None, str(tmp_path / name), {"port": 0})


def test_a_never_loadable_reward_ends_the_service(tmp_path):
    reward = f'[[reward_args]]\nreward_type = "one"\nengine = "fake_reward.Misconfigured"\nimport_from = [{HERE!r}]\n'
    (tmp_path / "service.toml").write_text(f"port = 0\n{reward}")
    command = [sys.executable, "-m", "vlmrm", "serve", "--config", str(tmp_path / "service.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert "the worker of one cannot load its reward: ConfigError: device is cuda:9" in ended.stderr.splitlines()[-1]


def test_the_service_announces_once_and_finishes_accepted_requests(tmp_path):
    gate = Gate(tmp_path)
    with served(tmp_path) as (process, url, logged):
        assert len([line for line in logged if f"Serving length on {url}" in line]) == 1
        httpx.get(f"{url}/health", timeout=300).raise_for_status()
        connection = post(url, gate.prompt)
        until(lambda: gate.worker == worker_of(logged))
        process.send_signal(signal.SIGTERM)
        lines_until(process, "accepted requests are finished first")
        gate.open()
        assert f'"score":{len(gate.prompt)}.0'.encode() in answer(connection)
        assert process.wait(300) == -signal.SIGTERM
        until_gone(worker_of(logged))


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_service_and_workers(tmp_path, kind):
    gate = Gate(tmp_path)
    with served(tmp_path) as (process, url, logged):
        connection = post(url, gate.prompt)
        until(lambda: gate.worker == worker_of(logged))
        process.send_signal(kind)
        lines_until(process, "a second signal ends the service at once")
        process.send_signal(kind)
        assert process.wait(300) == 128 + kind
        until_gone(worker_of(logged))
        connection.close()


def test_a_worker_does_not_outlive_a_killed_service(tmp_path):
    gate = Gate(tmp_path)
    with served(tmp_path) as (process, url, logged):
        connection = post(url, gate.prompt)
        until(lambda: gate.worker == worker_of(logged))
        process.kill()
        until_gone(worker_of(logged))
        connection.close()


def test_killed_handlers_and_fronts_are_replaced(tmp_path):
    def kill(kind: str) -> None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                if f"vlmrm.serving.{kind}" in child.cmdline():
                    child.kill()

    gate = Gate(tmp_path)
    with served(tmp_path) as (process, url, logged), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, f"{url}/v1/rewards", json={"items": [{"prompt": gate.prompt}]}, timeout=300)
        until(lambda: gate.worker == worker_of(logged))
        kill("handler")
        gate.open()
        assert asked.result().json()["data"][0]["score"] == len(gate.prompt)  # of the one computation
        kill("front")
        with httpx.Client(transport=httpx.HTTPTransport(retries=9)) as client:  # who waits is accepted by the next
            assert client.post(f"{url}/v1/rewards", json={"items": [{"prompt": "a"}]}, timeout=300).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/rewards HTTP/1.1\r\nHost: localho",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 70000,
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["silent", "slow", "large", "TLS", "HTTP/9.9", "HTTP/2"],
)
@in_loop
async def test_connections_that_dawdle_or_babble_are_closed(monkeypatch, sent):
    monkeypatch.setattr(http_server, "HEADER_S", 0.1)
    async with running(workers=False) as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(sent)
        received = b""
        with suppress(ConnectionResetError):  # what was sent came after that
            received = await reader.read()
        assert b" 200 " not in received
        writer.close()


def test_unusable_addresses_are_named_in_a_sentence():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use: choose another with --port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host 192\.0\.2\.1 is no address of this machine"):
        listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="host no such host cannot be resolved"):
        listen("no such host", 0)
