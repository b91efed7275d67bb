"""The service at twice and ten times the load that it can bear: what it still answers, and how soon it refuses.

The reward costs nothing, so the API is the bottleneck. Requests come at random times, each by a connection of its
own, from a process of their own; a client waits `PATIENCE_S` for its answer. Rows with `_busy` are measured beside two
programs that compute all the time, as a trainer on the same cores does.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from benchmarks.harness import Row, row
from benchmarks.protocols import questions
from benchmarks.servers import SERVE, in_turn, server
from benchmarks.watching import watched

T = TypeVar("T")

LOAD, FLOOD = 2.0, 10.0
FLOODED = 0.7  # of capacity, at that
CORE_MS = 0.6  # of the core's CPU time for a request
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


@dataclass(frozen=True)
class Targets:
    """What is asked of a service: of its capacity answered, ms until a refusal, of another reward, ms of /health."""

    goodput: float
    refused_ms: float
    other: float
    health_ms: float


QUIET, BUSY = Targets(0.9, 20.0, 1.5, 20.0), Targets(0.8, 50.0, 3.0, 50.0)


def overload(folder: Path, seconds: float) -> list[Row]:
    """Measure the service for so many seconds under each of its loads."""
    config = folder / "overload.toml"
    config.write_text(CONFIG.format(folder=Path(__file__).parent))
    with server(*SERVE, "--config", str(config), "--port", log=folder / "overload.log") as (url, process):
        port, core = int(url.rpartition(":")[2]), psutil.Process(process)
        before = sum(core.cpu_times()[:2])
        rate, count = _in_process(_capacity, port, seconds)
        core_ms = 1000 * (sum(core.cpu_times()[:2]) - before) / count
        found = _loaded(port, process, rate, seconds, QUIET, "")
        flood_rate = rate
        [flood] = _in_process(_storm, port, [Load("loaded", FLOOD * rate, seconds)])
        with beside_busy_programs():
            rate, _ = _in_process(_capacity, port, seconds)
            found += _loaded(port, process, rate, seconds, BUSY, "_busy")
    timely = sum(reply.status == 200 and reply.seconds < TIMELY_S for reply in flood) / seconds
    lost = sum(reply.status not in (200, 503) for reply in flood)
    flooded = row("overload_10x", timely / flood_rate, "of capacity", at_least=FLOODED, unanswered=lost)
    return [*found, flooded, row("core_ms", core_ms, "ms a request", at_most=CORE_MS)]


def _loaded(port: int, process: int, rate: float, seconds: float, targets: Targets, suffix: str) -> list[Row]:
    [alone] = _in_process(_storm, port, [Load("other", OTHER_RATE, seconds)])
    with watched(port, process) as read_watch:
        loads = [Load("loaded", LOAD * rate, seconds), Load("other", OTHER_RATE, seconds)]
        loaded, other = _in_process(_storm, port, loads)
        health = float(np.percentile(read_watch().health, 99))
    return rows(loaded, other, alone, health, rate, seconds, targets, suffix)


@contextmanager
def beside_busy_programs() -> Generator[None]:
    """Have two programs compute."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def rows(
    loaded: Sequence[Reply],
    other: Sequence[Reply],
    alone: Sequence[Reply],
    health: float,
    rate: float,
    seconds: float,
    targets: Targets = QUIET,
    suffix: str = "",
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
        row(f"overload{suffix}", timely / seconds / rate, "of capacity", at_least=targets.goodput, **counts)
        | {"answered_p99_ms": _p99_ms(answered), "capacity_per_s": rate},
        # A smoke run may refuse nothing.
        *(
            [row(f"overload_refusals{suffix}", _p99_ms(refused), "ms at p99", at_most=targets.refused_ms)]
            * bool(refused)
        ),
        row(
            f"overload_other{suffix}",
            _p99_ms(_waited(other)) / _p99_ms(_waited(alone)),
            "x alone at p99",
            at_most=targets.other,
            answered=sum(reply.status == 200 for reply in other),
            of=len(other),
        ),
        row(f"health_p99{suffix}", health, "ms", at_most=targets.health_ms),
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


def _capacity(port: int, seconds: float) -> tuple[float, int]:
    """Return the requests that are answered a second, when each client waits for its last answer, and in all."""
    requests = _requests("loaded")

    async def ask(duration: float) -> int:
        end, count = time.perf_counter() + duration, 0
        while time.perf_counter() < end:
            replies = await in_turn(CLIENTS, requests, lambda request: _send(port, request))
            count += sum(reply.status == 200 for reply in replies)
        return count

    warming = asyncio.run(ask(seconds / 4))
    began = time.perf_counter()
    count = asyncio.run(ask(seconds))
    return count / (time.perf_counter() - began), warming + count


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
