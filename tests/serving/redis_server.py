"""A Redis server of one's own on a free port: started, killed, stopped, and there again with its data."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis as redis_py


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class RedisServer:
    """With its data in `folder`, and `options` as its configuration's keys and values."""

    def __init__(self, folder: Path, *options: str, tls: bool = False):
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server, or run .ci/run")
        self.folder, self.port = folder, free_port()
        ports = ("--port", "0", "--tls-port") if tls else ("--port",)
        self.options = [*ports, str(self.port), "--dir", str(folder), "--appendonly", "yes", "--save", "", *options]
        self.start()

    @property
    def settings(self) -> dict[str, object]:
        """Of a service that uses it; what tests share it are told apart by the prefix."""
        return {"redis_host": "127.0.0.1", "redis_port": self.port, "redis_prefix": f"test-{os.urandom(8).hex()}"}

    def start(self) -> None:
        words = ["redis-server", "--bind", "127.0.0.1", *self.options]
        # Signals are left as Python has them: a file over a limit is an error to write to, and no reason to die.
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=self.folder, restore_signals=False)
        self._answers()

    def _answers(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"redis-server did not start: {self.process.poll()}")

    def client(self) -> redis_py.Redis:
        return redis_py.Redis(port=self.port)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
