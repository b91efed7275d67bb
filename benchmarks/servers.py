"""Servers in processes of their own, and many concurrent clients of them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 600.0  # until a server is ready, and until it has ended
SERVE = ("-c", "from vlmrm.cli import main; main()", "serve")

T = TypeVar("T")


@contextmanager
def server(*words: str, log: Path, ready: str = "/ready") -> Generator[tuple[str, int]]:
    """Run `python WORDS PORT`; yield its address and process id once `ready` answers; its output goes to `log`."""
    # One thread, as in all that is compared.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with socket.socket() as reserved, log.open("w") as output:
        # Bound but not listening: the kernel gives the port to no other process, but the server may bind it too.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        process = subprocess.Popen([sys.executable, *words, str(port)], env=environment, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, f"{url}{ready}", log)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()[-2000:]}")


def client(url: str) -> httpx.AsyncClient:
    """Return a client without a limit of connections."""
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


async def in_turn(clients: int, items: Sequence[Any], ask: Callable[[Any], Awaitable[T]]) -> list[T]:
    """Return `ask(item)` for each item in order; each of the clients takes the next item when it has an answer."""
    answers: list[Any] = [None] * len(items)
    left = iter(enumerate(items))

    async def worker() -> None:
        for index, item in left:
            answers[index] = await ask(item)

    await asyncio.gather(*(worker() for _ in range(clients)))
    return answers
