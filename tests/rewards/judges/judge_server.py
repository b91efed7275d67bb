"""A small OpenAI-compatible server over real HTTP that answers as the test says, and remembers what it was asked."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], str]  # status, headers, body
HUNG = 60.0  # seconds until a server that holds its answer back gives up, should a test go wrong


def completion(text: str | None, finish: str = "stop", tokens: list[tuple[str, float]] | None = None) -> Answer:
    """A chat completion of `text`; `tokens` are the likeliest first ones with their log-probabilities."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    if tokens is not None:
        top = [{"token": token, "logprob": logprob, "bytes": None} for token, logprob in tokens]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return 200, {}, json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})


def error(status: int, message: str = "no", **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message}})
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


class Quiet(ThreadingHTTPServer):
    """Who gave up waiting is gone, which is nothing to print into the output of another test."""

    daemon_threads = True
    request_queue_size = 512  # the clients connect at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class JudgeServer:
    """Answers each request by `behave(body, number)`, numbers from 0; None cuts the connection.

    `paths`, `bodies`, `sent` (their bytes) and `headers` (in lower case) are of the requests in their order. `waiting`
    is set to let held answers go. Asked whether it lives it says so, after the statuses of `health`, and counts
    `pings`.
    """

    def __init__(self, prefix: str = "/v1") -> None:
        self.behave: Callable[[dict[str, Any], int], Answer | None] = lambda body, number: completion("hello")
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.sent: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.health: deque[int] = deque()
        self.pings = threading.Semaphore(0)
        self.waiting = threading.Event()
        self._lock = threading.Lock()
        self._http = Quiet(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}{prefix}"

    def start(self) -> None:
        serve = {"target": self._http.serve_forever, "kwargs": {"poll_interval": 0.01}}
        threading.Thread(**serve, daemon=True).start()

    def close(self) -> None:
        self.waiting.set()
        self._http.shutdown()
        self._http.server_close()

    @contextmanager
    def running(self) -> Iterator[JudgeServer]:
        self.start()
        try:
            yield self
        finally:
            self.close()

    def hold(self) -> None:
        """Keeps the caller waiting until the test is over."""
        self.waiting.wait(HUNG)

    @property
    def texts(self) -> list[str]:
        """All text of each request's last message."""
        contents = [body["messages"][-1]["content"] for body in self.bodies]
        return ["\n".join(part["text"] for part in content if part["type"] == "text") for content in contents]

    def images(self, number: int = 0) -> list[str]:
        """The data URIs of a request."""
        content = self.bodies[number]["messages"][-1]["content"]
        return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]

    def _take(self, request: BaseHTTPRequestHandler) -> tuple[dict[str, Any], int]:
        sent = request.rfile.read(int(request.headers["Content-Length"]))
        body = json.loads(sent)
        with self._lock:
            self.sent.append(sent)
            self.paths.append(request.path)
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            return body, len(self.bodies) - 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.pings.release()
                # Or a closed server would answer on it. Said, as a call on a connection that just closes is lost.
                self._send(server.health.popleft() if server.health else 200, {"Connection": "close"}, "")

            def do_POST(self) -> None:
                answer = server.behave(*server._take(self))
                if answer is None:
                    self.close_connection = True
                else:
                    self._send(*answer)

            def _send(self, status: int, headers: dict[str, str], text: str) -> None:
                self.send_response(status)
                sent = {"Content-Type": "application/json", "Content-Length": str(len(text.encode())), **headers}
                for name, value in sent.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
