"""Candidates of one picture that come one after another, as RL trainers send samples when they are finished, over the
same in one request: seconds of the processor in the service's workers, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Row, row
from benchmarks.servers import client
from benchmarks.serving.clients import CANDIDATES, Item, group, native
from benchmarks.serving.throughput import TOLERANCE

MOST = 1.5

Way = Callable[[str, Sequence[Item]], list[float]]


def streamed(service: str, process: int, groups: int, rounds: int) -> Row:
    """Measure groups of 16 in turn, each with a new picture; the scores of the two ways must agree in the end."""
    ways: dict[str, Way] = {"at_once": at_once, "streamed": one_by_one}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, ask in ways.items():
            asked = [group() for _ in range(groups)]
            before = processor_seconds(process)
            scores = [ask(service, items) for items in asked]
            if number:
                seconds[name].append(processor_seconds(process) - before)
            other = at_once if ask is one_by_one else one_by_one
            if not np.allclose(scores[0], other(service, asked[0]), atol=TOLERANCE):
                raise AssertionError("the two ways have different scores: there is nothing to compare")
    ratios = [slow / fast for slow, fast in zip(seconds["streamed"], seconds["at_once"], strict=True)]
    line = row(f"streamed_{CANDIDATES}", median(ratios), "x at once", at_most=MOST, lowest=min(ratios))
    each = {f"{name}_seconds": median(times) / groups for name, times in seconds.items()}
    return line | {"highest": max(ratios)} | each


def at_once(service: str, items: Sequence[Item]) -> list[float]:
    """Return the scores of one request with all items."""

    async def ask() -> list[float]:
        messages = [item.conversation(f"data:image/png;base64,{item.encoded}") for item in items]
        async with client(service) as asker:
            answer = await asker.post("/v1/rewards", json={"items": [{"messages": them} for them in messages]})
        return [line["raw"] for line in answer.raise_for_status().json()["data"]]

    return asyncio.run(ask())


def one_by_one(service: str, items: Sequence[Item]) -> list[float]:
    """Return the scores of a request an item, each sent when the one before it is answered."""

    async def ask() -> list[float]:
        async with client(service) as asker:
            return [await native(asker, item) for item in items]

    return asyncio.run(ask())


def processor_seconds(process: int) -> float:
    """Return the seconds of the processor that the descendants of a process have taken, without its own."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # its own, and those of children that have ended
    below = {process}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(ticks[child] for child in below - {process}) / os.sysconf("SC_CLK_TCK")
