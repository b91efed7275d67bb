"""The reward service with a real worker: requests a second and latencies, by the clock on the wall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial

import httpx2 as httpx
import numpy as np

from benchmarks import runs
from benchmarks.gpu.models import checkpoint
from benchmarks.gpu.running import Run
from benchmarks.harness import Row, row
from benchmarks.servers import SERVE, client, in_turn, server
from benchmarks.serving.clients import CANDIDATES, LARGE, Item, item, native, picture

CLIENTS = (1, 16, 64)
EACH, FEWEST = 6, 40  # requests of a client, and of all together


def service(run: Run) -> None:
    """Send new conversations about new pictures, and groups of candidates, from clients at the same time."""
    cases = [f"{count} clients" for count in CLIENTS] + [f"groups of {CANDIDATES}"]
    if all(run.over(case) for case in cases):
        return
    path = str(checkpoint(run.scratch, "3b", run.device, run.tiny))
    with (
        runs.workplace() as folder,
        server(*SERVE, "--model", path, "--port", log=folder / "log", one_thread=False) as (url, _),
    ):
        asyncio.run(answered(url, 2, questions(4)))  # what is loaded by the first
        for count in CLIENTS[:2] if run.tiny else CLIENTS:
            run.attempt(f"{count} clients", partial(load, run, url, count))
        run.attempt(f"groups of {CANDIDATES}", partial(groups, run, url))


def questions(count: int, candidates: int = 1) -> list[list[Item]]:
    """Return requests of so many candidates about a new picture each."""
    pictures = [picture(LARGE) for _ in range(count)]
    return [[item(image) for _ in range(candidates)] for image in pictures]


async def answered(url: str, clients: int, requests: Sequence[list[Item]]) -> list[float]:
    """Return the seconds of each request, sent one by one by each client; a group's items go at the same time."""

    async def timed(asker: httpx.AsyncClient, items: list[Item]) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(native(asker, question) for question in items))
        return time.perf_counter() - started

    async with client(url) as asker:
        return await in_turn(clients, requests, partial(timed, asker))


def load(run: Run, url: str, clients: int) -> Iterator[Row]:
    """Yield the requests a second of so many clients, with the latencies that they saw."""
    requests = questions(2 * clients if run.tiny else max(FEWEST, EACH * clients))
    started = time.perf_counter()
    seconds = asyncio.run(answered(url, clients, requests))
    wall = time.perf_counter() - started
    yield row(f"{clients} clients", len(requests) / wall, "requests/s", clients=clients) | milliseconds(seconds)


def groups(run: Run, url: str) -> Iterator[Row]:
    """Yield the candidates a second of groups about one picture, a request for each, four groups at a time."""
    requests = questions(2 if run.tiny else 16, CANDIDATES)
    started = time.perf_counter()
    seconds = asyncio.run(answered(url, 4, requests))
    wall = time.perf_counter() - started
    count = len(requests) * CANDIDATES
    yield row(f"groups of {CANDIDATES}", count / wall, "candidates/s") | milliseconds(seconds)


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}_ms": float(np.percentile(seconds, q)) * 1000 for q in (50, 99)}
