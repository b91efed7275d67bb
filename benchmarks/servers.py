"""Servers in processes of their own, asked by many clients at a time."""

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
def server(*words: str, log: Path) -> Generator[tuple[str, int]]:
    """The address and the process id of `python WORDS PORT` once it is ready; what it says goes to `log`."""
    # One thread to compute with, as everything that is compared has.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with socket.socket() as held, log.open("w") as said:
        # Bound and not listening: nobody else is given the port, and the server may bind it as well.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        process = subprocess.Popen([sys.executable, *words, str(port)], env=environment, stdout=said, stderr=said)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, log)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{url}/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()[-2000:]}")


def client(url: str) -> httpx.AsyncClient:
    """With as many connections as there are requests at a time."""
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


async def in_turn(clients: int, items: Sequence[Any], ask: Callable[[Any], Awaitable[T]]) -> list[T]:
    """What `ask` says of each item, in order; each of so many clients asks for the next one once it has its own."""
    answers: list[Any] = [None] * len(items)
    left = iter(enumerate(items))

    async def one() -> None:
        for place, item in left:
            answers[place] = await ask(item)

    await asyncio.gather(*(one() for _ in range(clients)))
    return answers
