"""The reward service under twice the load that it can bear, by clients of every protocol, for 10 minutes.

Every accepted request must be answered, with the score that the same request has when nothing else is asked; `/health`
must stay quick and memory flat. Requests come at random times, each by a connection of its own; those refused do not
come again. The model is a small one, and yet what computes longest, as models are; with `--bottleneck api` the reward
costs nothing, and the service's own process has all the work.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from benchmarks.protocols import PROTOCOLS, REWARD, Refused, ask, questions
from benchmarks.servers import SERVE, in_turn, server
from benchmarks.shapes import configuration, reward_checkpoint
from benchmarks.watching import Watch, watched

MINUTES, LOAD = 10.0, 2.0
HEALTH_MS, GROWTH = 50.0, 1.05
SIDE = 84  # pixels of a picture
EACH = 800  # requests of each protocol: by the time that one comes again, its result is forgotten
CLIENTS = 32  # at a time, to measure capacity
TOLERANCE = 1e-3
CONFIG = """
[limits]
max_requests = 1024
queue_items = 200
result_ttl = 10
[[reward_args]]
reward_type = "{reward}"
"""
BOTTLENECKS = ("model", "api")


@dataclass
class Outcomes:
    """Counts of the requests by their outcome, and the errors of `broken` ones."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=MINUTES, help="default: %(default)g")
    parser.add_argument("--bottleneck", choices=BOTTLENECKS, default="model", help="default: %(default)s")


def measure(options: argparse.Namespace) -> list[Row]:
    minutes, per_protocol = (0.1, 20) if options.quick else (options.minutes, EACH)
    with runs.workplace() as folder:
        config = folder / "service.toml"
        config.write_text(CONFIG.format(reward=REWARD) + "".join(f"{line}\n" for line in engine(options, folder)))
        with server(*SERVE, "--config", str(config), "--port", log=folder / "service.log") as (url, process):
            port = int(url.rpartition(":")[2])
            pairs = zip(questions(per_protocol * len(PROTOCOLS), SIDE), itertools.cycle(PROTOCOLS.items()))
            # Each question is sent in one protocol only.
            requests = [(name, protocol.encoded(question)) for question, (name, protocol) in pairs]
            expected, capacity = asyncio.run(calm(port, requests))
            with watched(port, process) as read_watch:
                outcomes = asyncio.run(storm(port, requests, expected, LOAD * capacity, 60 * minutes))
                return rows(outcomes, read_watch(), capacity)


def engine(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the lines of the reward that make the bottleneck."""
    if options.bottleneck == "api":
        return ['engine = "trivial.Trivial"', f'import_from = ["{Path(__file__).parent / "serving"}"]']
    return [f'model_path = "{reward_checkpoint(folder, configuration("tiny" if options.quick else "h256"))}"']


async def calm(port: int, requests: Sequence[tuple[str, bytes]]) -> tuple[list[float], float]:
    """Return the score of each request, and the number of requests answered per second."""
    started = time.monotonic()
    scores = await in_turn(CLIENTS, requests, lambda protocol: ask(port, *protocol))
    return scores, len(requests) / (time.monotonic() - started)


async def storm(
    port: int, requests: Sequence[tuple[str, bytes]], expected: Sequence[float], rate: float, seconds: float
) -> Outcomes:
    """Send requests at `rate` per second, without waiting for responses."""
    outcomes = Outcomes()
    order = list(range(len(requests)))
    random.seed(0)
    random.shuffle(order)

    async def send(index: int) -> None:
        name, body = requests[index]
        try:
            score = await ask(port, name, body)
        except Refused:
            outcomes.counts["refused"] += 1
        except Exception as error:
            outcomes.counts["broken"] += 1
            outcomes.broken.append(f"{name}: {type(error).__name__}: {error}")
        else:
            outcomes.counts["answered" if abs(score - expected[index]) <= TOLERANCE else "wrong"] += 1

    sending: set[asyncio.Task[None]] = set()
    started = due = time.monotonic()
    while due < started + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(send(order[outcomes.counts["sent"] % len(order)]))
        sending.add(task)
        task.add_done_callback(sending.discard)
        outcomes.counts["sent"] += 1
        due += random.expovariate(rate)
    outcomes.counts["seconds"] = round(time.monotonic() - started)
    await asyncio.gather(*sending)
    return outcomes


def rows(outcomes: Outcomes, watch: Watch, capacity: float) -> list[Row]:
    counts = outcomes.counts
    missed = counts["sent"] - counts["answered"] - counts["refused"]
    answers = row("not answered, or wrongly", missed, "requests", at_most=0, **counts)
    answers |= {"capacity_per_s": capacity, "sent_per_s": counts["sent"] / max(counts["seconds"], 1)}
    if outcomes.broken:
        answers["first"] = outcomes.broken[0]
    health = row("/health", max(watch.health), "ms at most", at_most=HEALTH_MS)
    health |= {"median": float(np.median(watch.health)), "p99": float(np.percentile(watch.health, 99))}
    memory = np.array(watch.memory)
    window = max(len(memory) // 10, 1)
    early = len(memory) // 5  # after the warm-up
    begin, end = (np.median(part, axis=0) for part in (memory[early : early + window], memory[-window:]))
    lines = [
        row(
            f"memory of {name}",
            float(after / before),
            "x",
            at_most=GROWTH,
            begin_mb=float(before),
            end_mb=float(after),
        )
        for name, before, after in zip(("service", "workers"), begin, end, strict=True)
    ]
    return [answers, health, *lines]


if __name__ == "__main__":
    harness.main("soak", measure, __doc__, add_options)
