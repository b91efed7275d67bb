"""Seconds that rounds of 64 samples take once a reward's server is down: `python drives/rounds.py [ROUTE|MANNER]...`.

A server that answers becomes one that is dead, silent, drips a byte a second, refuses or fails. Settings are the
defaults, but for `on_failure: mask`. The first round may take 12 s, those after it 0.1 s; else the status is 1.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet

SAMPLES, FIRST_S, LATER_S = 64, 12.0, 0.1
ROUTES = {
    "vlm_reward": {"model_path": "{}"},
    "remote_pointwise": {"server_url": "{}"},
    "vllm_evaluate": {"api_base_url": "{}/v1", "question": "Is it red?"},
}
MANNERS = ("dead", "silent", "dripping", "refusing", "failing")
STATUS = {"refusing": 401, "failing": 503}


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size, manner = True, 512, "well"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Those who gave up waiting are gone."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.manner == "silent":
            time.sleep(3600)
        self.answer(200, b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.manner == "silent":
            time.sleep(3600)
        if self.server.manner == "dripping":
            self.answer(200, b"", length=3600)
            with suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    time.sleep(1)
        self.answer(STATUS[self.server.manner], json.dumps({"error": {"message": "no"}}).encode())

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def server() -> Generator[Server]:
    with Server(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield one
        one.shutdown()


def rounds(route: str, manner: str) -> list[tuple[float, str]]:
    """Return the seconds of three rounds, and what came of each."""
    images = [Image.new("RGB", (28, 28), (number, 0, 0)) for number in range(SAMPLES)]
    found = []
    with server() as one:
        settings = {name: value.format(f"http://127.0.0.1:{one.server_port}") for name, value in ROUTES[route].items()}
        rewards = RewardSet([{"name": "it", "reward_model": route, "on_failure": "mask", **settings}])
        one.manner = manner
        if manner == "dead":
            one.shutdown()
            one.server_close()
        for _ in range(3):
            began = time.monotonic()
            try:
                scored = rewards(prompt=["a cat"] * SAMPLES, image=images)
                came = f"{len(scored.failures['it'])} missing"
            except RewardError:
                came = "raises"
            found.append((time.monotonic() - began, came))
    return found


def main(words: list[str]) -> int:
    late = 0
    for route in ROUTES:
        for manner in MANNERS:
            if words and not {route, manner} & set(words):
                continue
            first, *later = rounds(route, manner)
            slow = first[0] > FIRST_S or any(seconds > LATER_S for seconds, _ in later)
            late += slow
            said = ", ".join(f"{seconds:.2f} s {came}" for seconds, came in (first, *later))
            sys.stdout.write(f"{route} {manner}: {said}{': too long' * slow}\n")
            sys.stdout.flush()
    return int(late > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
