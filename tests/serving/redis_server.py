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


def reserved() -> socket.socket:
    """Bound to a free port, which nobody is given while it is open; a server that names the port may listen there."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class RedisServer:
    """With its data in `folder`, and `options` as its configuration's keys and values; a sentinel with a `config`."""

    def __init__(self, folder: Path, *options: str, config: Path | None = None):
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server, or run .ci/run")
        self.folder, self._holder = folder, reserved()
        self.port = self._holder.getsockname()[1]
        self.options = ["--port", str(self.port), "--dir", str(folder), "--appendonly", "yes", "--save", "", *options]
        if config is not None:
            self.options = [*self.options[:2], "--sentinel"]
        self._config = [] if config is None else [str(config)]
        self.start()

    @property
    def settings(self) -> dict[str, object]:
        """Of a service that uses it; what tests share it are told apart by the prefix."""
        return {"redis_host": "127.0.0.1", "redis_port": self.port, "redis_prefix": f"test-{os.urandom(8).hex()}"}

    def start(self) -> None:
        words = ["redis-server", *self._config, "--bind", "127.0.0.1", *self.options]
        # Signals are left as Python has them: a file over a limit is an error to write to, and no reason to die.
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=self.folder, restore_signals=False)
        self._answers()

    def _answers(self) -> None:
        while self.process.poll() is None:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"redis-server did not start: it ended with status {self.process.returncode}")

    def client(self) -> redis_py.Redis:
        return redis_py.Redis(port=self.port)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        self._holder.close()
