"""A reward server on this machine that answers as a test tells it to."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


class RewardServer:
    """Answers the width of each image, after the `faults`, each taken once: (status, body, headers), CUT or SILENT.

    `requests` has what was asked: (path, headers, body).
    """

    CUT = "the connection is cut"
    SILENT = "nothing comes"

    def __init__(self, port: int = 0, prefix: str = ""):
        self.prefix = prefix
        self.faults: deque[Any] = deque()
        self.health: deque[int] = deque()
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.stopped = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_GET(self):
                status = server.health.popleft() if server.health else 200
                self._send(status if self.path == f"{server.prefix}/health" else 404, b'{"status":"ok"}')

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, dict(self.headers), body))
                fault = server.faults.popleft() if server.faults else None
                if fault == server.SILENT:
                    server.stopped.wait(60)
                if fault in (server.SILENT, server.CUT):
                    self.close_connection = True
                    self.connection.close()
                elif fault is not None:
                    status, text, *headers = fault
                    self._send(status, text.encode(), *headers)
                else:
                    self._send(200, json.dumps({"rewards": [decoded(png).width for png in body["image"]]}).encode())

            def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass  # a cut connection

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}{prefix}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.stopped.set()
        self.http.shutdown()
        self.http.server_close()


def decoded(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png, validate=True)), formats=["PNG"])
