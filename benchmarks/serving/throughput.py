"""The service's throughput over the offline scorer's, what it adds to a score's latency, and groups of candidates
over a plain server. Every request is new, so none is answered from memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row, row
from benchmarks.servers import client
from benchmarks.serving.clients import (
    CLIENTS,
    SMALL,
    Item,
    compute,
    group,
    item,
    native,
    offline,
    picture,
    together,
)
from vlmrm.scoring.scorer import LocalScorer

THROUGHPUT, ADDED_MS, GROUPED = 0.85, 8.0, 4.0
TOLERANCE = 1e-3


Way = Callable[[Sequence[Item]], list[float]]


def concurrent(scorer: LocalScorer, service: str, per_client: int, rounds: int) -> Row:
    """Time 64 clients, each of which sends its next conversation when the last one is answered."""
    makers = {
        "offline": lambda items: offline(scorer, items),
        "service": lambda items: together(service, items, native),
    }
    timings = compared(makers, lambda: [item(picture(SMALL)) for _ in range(CLIENTS * per_client)], rounds)
    line = row(f"concurrent_{CLIENTS}", **timings.ratio("offline", "service"), unit="x offline", at_least=THROUGHPUT)
    rates = {f"{name}_items_per_s": CLIENTS * per_client / timings.median(name) for name in makers}
    return line | rates


def low_load(scorer: LocalScorer, service: str, count: int) -> Row:
    """Time one conversation at a time, in turn by the service and a scorer that keeps as much as its own."""
    seconds: dict[str, list[float]] = {"offline": [], "service": []}

    async def ask() -> None:
        async with client(service) as asker:
            for _ in range(count + 1):
                question = item(picture(SMALL))
                started = time.perf_counter()
                offline(scorer, [question])
                between = time.perf_counter()
                await native(asker, question)
                seconds["offline"].append(between - started)
                seconds["service"].append(time.perf_counter() - between)

    asyncio.run(ask())
    medians = {name: 1000 * statistics.median(times[1:]) for name, times in seconds.items()}
    added = medians["service"] - medians["offline"]
    details = {"offline_ms": medians["offline"], "offline_cache_bytes": scorer.cache.limit}
    return row("low_load", added, "ms added", at_most=ADDED_MS, **details)


def rl_load(service: str, plain: str, groups: int, rounds: int) -> Row:
    """Time groups of 16 candidates at once, a request per candidate."""
    makers = {
        "plain": lambda items: together(plain, items, compute),
        "service": lambda items: together(service, items, native),
    }
    timings = compared(makers, lambda: [question for _ in range(groups) for question in group()], rounds)
    line = row("rl_load", **timings.ratio("plain", "service"), unit="x plain", at_least=GROUPED)
    return line | {f"{name}_seconds": timings.median(name) for name in makers}


def compared(ways: Mapping[str, Way], make: Callable[[], list[Item]], rounds: int) -> harness.Timings:
    """Time the ways in turn on the same items, new ones in each round; their scores must agree."""
    scores: dict[str, list[float]] = {}
    items: list[Item] = []

    def prepare(name: str) -> Callable[[], Any]:
        nonlocal items
        if name == next(iter(ways)):
            items = make()

        def work() -> None:
            scores[name] = ways[name](items)

        return work

    timings = harness.interleave({name: lambda name=name: prepare(name) for name in ways}, rounds, device="wall")
    first, second = scores.values()
    if not np.allclose(first, second, atol=TOLERANCE):
        raise AssertionError("the two ways have different scores: there is nothing to compare")
    return timings
