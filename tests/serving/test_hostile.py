"""A service with a real model, and what is sent to fill its memory or hold up its other clients.

Memory is that of all its processes, with what they share counted once.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import av
import httpx2 as httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.serving.hosts import Host
from tests.serving.sent_media import data_uri

TOKEN = "s3cret"
BODIES_MB = 256  # of all bodies together
SIDE = 5792  # of the largest square image that the limits allow
CONFIG = f"""
token = "{TOKEN}"
[limits]
max_bodies_bytes = {BODIES_MB * 2**20}
[[reward_args]]
reward_type = "vlm_reward"
device = "cpu"
model_path = "{{model}}"
"""


@pytest.fixture(scope="module")
def host(tiny_reward_model, tmp_path_factory) -> Generator[Host]:
    """A service that has seen an image which its processes prepare, so that these have begun."""
    config = tmp_path_factory.mktemp("hostile") / "service.toml"
    config.write_text(CONFIG.format(model=tiny_reward_model))
    host = Host("", config)
    try:
        host.until_ready()
        assert "score" in score(host, [part(png(2048, 2048))])
        yield host
    finally:
        host.end()


@contextmanager
def budget(host: Host, megabytes: float) -> Generator[None]:
    """Fails where the service grows by more."""
    before, peak, over = held(host), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.01):
            peak = max(peak, held(host))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert peak - before < megabytes


def held(host: Host) -> float:
    """Megabytes of the service and its children."""
    service, total = psutil.Process(host.process.pid), 0.0
    for process in (service, *service.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss / 2**20
    return total


def score(host: Host, content: list[dict[str, Any]]) -> dict[str, Any]:
    """What the service answers to one conversation: its item, or the error of the request."""
    question = [*content, {"type": "text", "text": f"question {time.monotonic_ns()}"}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
    return ask(host, {"items": [{"messages": messages}]})


def ask(host: Host, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(
        f"{host.url}/v1/rewards", json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300
    ).json()
    [item] = answer.get("data") or [answer]
    return {key: item[key] for key in ("score", "error") if item.get(key) is not None}


def png(width: int, height: int, form: str = "PNG", mode: str = "RGBA") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, form)
    return file.getvalue()


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def film(width: int, height: int, frames: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt, stream.options = width, height, "yuv420p", {"preset": "ultrafast"}
        frame = av.VideoFrame.from_ndarray(np.zeros((height, width, 3), np.uint8), format="rgb24")
        for _ in range(frames):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def test_an_image_bomb_is_not_unpacked(host):
    bomb = part(png(8192, 8192))
    with budget(host, 150):
        assert "over the limit" in str(score(host, [bomb])["error"])


@pytest.mark.parametrize(("form", "mode"), [("PNG", "RGBA"), ("PNG", "L"), ("WEBP", "RGBA"), ("JPEG", "RGB")])
def test_the_largest_image_is_scored_in_a_gigabyte(host, form, mode):
    largest = part(png(SIDE, SIDE, form, mode))
    with budget(host, 1024):
        assert "score" in score(host, [largest])


@pytest.mark.parametrize(("side", "count"), [(8192, 8), (SIDE, 9)])
def test_frames_that_unpack_to_gigabytes_are_not_unpacked(host, side, count):
    frame = data_uri(png(side, side))
    with budget(host, 150):
        assert "over the limit" in str(ask(host, {"items": [{"prompt": "It waves.", "video": [frame] * count}]}))


def test_a_4k_video_is_scored_within_a_gigabyte(host):
    video = data_uri(film(3840, 2160, 48), "video/mp4")
    with budget(host, 1024):
        assert "score" in ask(host, {"items": [{"prompt": "It waves.", "video": video}]})


def open_request(host: Host, length: int, token: str = "") -> socket.socket:
    """A connection on which the head of a request has been sent."""
    connection = socket.create_connection(("127.0.0.1", host.port), timeout=300)
    head = "POST /v1/rewards HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
    return connection


def test_what_comes_without_a_token_is_not_taken(host):
    with budget(host, 50):
        connection = open_request(host, 200 * 2**20)
        with suppress(OSError):  # the service has answered and closed
            for _ in range(200):
                connection.sendall(bytes(2**20))
        assert httpx.get(f"{host.url}/health", timeout=300).status_code == 200
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.close()


def test_endless_bodies_share_one_budget_and_block_nobody(host):
    half = BODIES_MB // 4 * 2**20
    with ExitStack() as opened, budget(host, 2 * BODIES_MB):
        begun = [opened.enter_context(open_request(host, 2 * half, TOKEN)) for _ in range(3)]
        for connection in begun:
            connection.sendall(bytes(half))
        for _ in range(4):  # beside these three, each of them is more than there is room for
            for connection in begun:
                connection.sendall(b" ")
            with open_request(host, half + 1, TOKEN) as refused:
                with suppress(OSError):  # the service has answered and closed
                    refused.sendall(bytes(half + 1))
                assert refused.recv(12) == b"HTTP/1.1 503"
        assert "score" in score(host, [part(png(64, 64))])
        assert httpx.get(f"{host.url}/health", timeout=300).status_code == 200
