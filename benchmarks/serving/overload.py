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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, row
from benchmarks.protocols import post, questions
from benchmarks.servers import SERVE, in_turn, server
from benchmarks.watching import watched

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
    config = folder / "overload.toml"
    config.write_text(CONFIG.format(folder=Path(__file__).parent))
    with server(*SERVE, "--config", str(config), "--port", log=folder / "overload.log") as (url, process):
        port = int(url.rpartition(":")[2])
        [rate] = _in_process(_capacity, port, seconds)
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
    refused = [reply.seconds for reply in loaded if reply.status == 503]
    counts = {
        "answered": len(answered),
        "refused": len(refused),
        "without": len(loaded) - len(answered) - len(refused),
    }
    others = [reply.seconds for reply in other if reply.status == 200]
    return [
        row("overload", timely / seconds / rate, "of capacity", at_least=GOODPUT, capacity_per_s=rate, **counts)
        | {"answered_p99_ms": _p99_ms(answered)},
        row("overload_refusals", _p99_ms(refused), "ms at p99", at_most=REFUSED_MS),
        row(
            "overload_other",
            _p99_ms(others) / _p99_ms([reply.seconds for reply in alone]),
            "x alone at p99",
            at_most=OTHER,
            answered=len(others),
            of=len(other),
        ),
        row("health_p99", health, "ms", at_most=HEALTH_MS),
    ]


def _p99_ms(seconds: Sequence[float]) -> float:
    return 1000 * float(np.percentile(seconds, 99)) if seconds else float("nan")


def _in_process(work, *arguments):
    """Run the clients in a process of their own, whose event loop is not the benchmark's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _bodies(reward: str) -> list[bytes]:
    pictured = questions(BODIES, SIDE)
    image = [f"data:image/png;base64,{question.file}" for question in pictured]
    items = [{"prompt": question.prompt, "image": picture} for question, picture in zip(pictured, image, strict=True)]
    return [json.dumps({"model": reward, "items": [item]}).encode() for item in items]


def _capacity(port: int, seconds: float) -> list[float]:
    """Return the requests that are answered a second, when each client waits for its last answer."""
    bodies = _bodies("loaded")

    async def ask() -> list[float]:
        rates = []
        for _ in range(2):  # the first warms up
            began, count = time.perf_counter(), 0
            while time.perf_counter() < began + seconds / 2:
                await in_turn(CLIENTS, bodies[:128], lambda body: post(port, "/v1/rewards", body))
                count += 128
            rates.append(count / (time.perf_counter() - began))
        return rates[1:]

    return asyncio.run(ask())


def _storm(port: int, loads: Sequence[Load]) -> list[list[Reply]]:
    bodies = {load.reward: _bodies(load.reward) for load in loads}

    async def send(body: bytes) -> Reply:
        began = time.perf_counter()
        try:
            status, _ = await asyncio.wait_for(post(port, "/v1/rewards", body), PATIENCE_S)
        except (TimeoutError, OSError, IndexError):  # no answer, or not a whole one
            status = 0
        return Reply(status, time.perf_counter() - began)

    async def run(load: Load) -> list[Reply]:
        sending = []
        due = time.perf_counter()
        end = due + load.seconds
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sending.append(asyncio.create_task(send(random.choice(bodies[load.reward]))))
            due += random.expovariate(load.rate)
        return await asyncio.gather(*sending)

    async def all_loads() -> list[list[Reply]]:
        return await asyncio.gather(*map(run, loads))

    return asyncio.run(all_loads())
