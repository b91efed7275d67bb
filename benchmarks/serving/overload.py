"""The service at twice the load that its own process can bear: what it still answers, and how soon it refuses.

The reward costs nothing, so the API is the bottleneck. Requests come at random times, each by a connection of its
own, from a process of their own; a client waits `PATIENCE_S` for its answer.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.harness import Row, row
from benchmarks.protocols import questions
from benchmarks.servers import SERVE, in_turn, server
from benchmarks.watching import watched

T = TypeVar("T")

LOAD = 2.0
GOODPUT, REFUSED_MS, OTHER, HEALTH_MS = 0.9, 50.0, 1.5, 50.0
PATIENCE_S = 10.0
TIMELY_S = 3.0  # in which an answer counts
CLIENTS = 32  # at a time, to measure capacity
SIDE = 84  # pixels of a picture
BODIES = 512
OTHER_RATE = 5.0  # requests a second of the other reward
CONFIG = """
[limits]
result_ttl = 0
[[reward_args]]
reward_type = "loaded"
engine = "trivial.Trivial"
import_from = ["{folder}"]
[[reward_args]]
reward_type = "other"
engine = "trivial.Trivial"
import_from = ["{folder}"]
"""


@dataclass(frozen=True)
class Load:
    """So many requests a second to a reward, for so many seconds."""

    reward: str
    rate: float
    seconds: float


@dataclass(frozen=True)
class Reply:
    """The status of an answer, 0 where none came, and the seconds until it came."""

    status: int
    seconds: float


def overload(folder: Path, seconds: float) -> list[Row]:
    """Measure the service for so many seconds under each of its loads."""
    config = folder / "overload.toml"
    config.write_text(CONFIG.format(folder=Path(__file__).parent))
    with server(*SERVE, "--config", str(config), "--port", log=folder / "overload.log") as (url, process):
        port = int(url.rpartition(":")[2])
        rate = _in_process(_capacity, port, seconds)
        [alone] = _in_process(_storm, port, [Load("other", OTHER_RATE, seconds)])
        with watched(port, process) as read_watch:
            loaded, other = _in_process(
                _storm, port, [Load("loaded", LOAD * rate, seconds), Load("other", OTHER_RATE, seconds)]
            )
            health = float(np.percentile(read_watch().health, 99))
    return rows(loaded, other, alone, health, rate, seconds)


def rows(
    loaded: Sequence[Reply], other: Sequence[Reply], alone: Sequence[Reply], health: float, rate: float, seconds: float
) -> list[Row]:
    answered = [reply.seconds for reply in loaded if reply.status == 200]
    timely = sum(seconds < TIMELY_S for seconds in answered)
    # Whoever has had no answer has waited for it.
    refused = [reply.seconds for reply in loaded if reply.status in (0, 503)]
    counts = {
        "answered": len(answered),
        "refused": sum(reply.status == 503 for reply in loaded),
        "unanswered": sum(reply.status == 0 for reply in loaded),
        "failed": sum(reply.status not in (0, 200, 503) for reply in loaded),
    }
    return [
        row("overload", timely / seconds / rate, "of capacity", at_least=GOODPUT, capacity_per_s=rate, **counts)
        | {"answered_p99_ms": _p99_ms(answered)},
        # A smoke run may refuse nothing.
        *([row("overload_refusals", _p99_ms(refused), "ms at p99", at_most=REFUSED_MS)] if refused else []),
        row(
            "overload_other",
            _p99_ms(_waited(other)) / _p99_ms(_waited(alone)),
            "x alone at p99",
            at_most=OTHER,
            answered=sum(reply.status == 200 for reply in other),
            of=len(other),
        ),
        row("health_p99", health, "ms", at_most=HEALTH_MS),
    ]


def _waited(replies: Sequence[Reply]) -> list[float]:
    """Return how long each client waited for its score: who was refused or had no answer, all its patience."""
    return [reply.seconds if reply.status == 200 else PATIENCE_S for reply in replies]


def _p99_ms(seconds: Sequence[float]) -> float:
    return 1000 * float(np.percentile(seconds, 99)) if seconds else float("nan")


def _in_process(work: Callable[..., T], *arguments: Any) -> T:
    """Run the clients in a process of their own, whose event loop is not the benchmark's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _requests(reward: str) -> list[bytes]:
    """Return requests as bytes, so that sending one costs next to nothing."""
    requests = []
    for question in questions(BODIES, SIDE):
        item = {"prompt": question.prompt, "image": f"data:image/png;base64,{question.file}"}
        body = json.dumps({"model": reward, "items": [item]}).encode()
        head = "POST /v1/rewards HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


class _Client(asyncio.Protocol):
    """One request by a connection of its own; `reply` is done once the service has closed it."""

    def __init__(self, request: bytes):
        self._request = request
        self._status = b"0"
        self._began = time.perf_counter()
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._status == b"0":
            self._status = data[9:12]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.reply.done():
            self.reply.set_result(Reply(int(self._status), time.perf_counter() - self._began))


async def _send(port: int, request: bytes) -> Reply:
    client = _Client(request)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
            return await client.reply
    except (TimeoutError, OSError):
        return Reply(0, PATIENCE_S)


def _capacity(port: int, seconds: float) -> float:
    """Return the requests that are answered a second, when each of the clients waits for its last answer."""
    requests = _requests("loaded")

    async def ask(duration: float) -> int:
        end, count = time.perf_counter() + duration, 0
        while time.perf_counter() < end:
            replies = await in_turn(CLIENTS, requests, lambda request: _send(port, request))
            count += sum(reply.status == 200 for reply in replies)
        return count

    asyncio.run(ask(seconds / 4))  # warms up
    began = time.perf_counter()
    return asyncio.run(ask(seconds)) / (time.perf_counter() - began)


def _storm(port: int, loads: Sequence[Load]) -> list[list[Reply]]:
    """Return the replies to each load, whose requests come at random times and wait for no other."""

    async def run(load: Load, requests: Sequence[bytes]) -> list[Reply]:
        sending = []
        due = time.perf_counter()
        end = due + load.seconds
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sending.append(asyncio.create_task(_send(port, random.choice(requests))))
            due += random.expovariate(load.rate)
        return await asyncio.gather(*sending)

    async def all_loads() -> list[list[Reply]]:
        return await asyncio.gather(*(run(load, requests[load.reward]) for load in loads))

    requests = {load.reward: _requests(load.reward) for load in loads}
    return asyncio.run(all_loads())
