"""The reward service: its throughput over the offline scorer's, what it adds to a score's latency; a plain server's
time for groups of candidates over its own. Clients are in this process, servers in others; by the clock on the wall.

The model is that of `train_step`'s h512. Every request is new, so none is answered from memory.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import numpy as np
from PIL import Image

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from benchmarks.servers import SERVE, client, in_turn, server
from benchmarks.shapes import configuration, reward_checkpoint
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.scorer import LocalScorer

PROMPT = "What is shown in this picture, and how is it drawn? Say it in one sentence."
ANSWER = "There are {} blots in this picture, of several colours, that lie beside each other."
SMALL, LARGE = 224, 448  # pixels: 64 and 256 tokens
THROUGHPUT, ADDED_MS, GROUPED = 0.85, 8.0, 4.0
CLIENTS, EACH = 64, 2
ALONE = 40
GROUPS, CANDIDATES = 4, 16
ROUNDS = 3
TOLERANCE = 1e-3

number = itertools.count()


@dataclass(frozen=True)
class Item:
    """An answer to a question about an image, a PNG file."""

    picture: bytes
    answer: str

    def conversation(self, image: Any) -> list[dict[str, Any]]:
        question = [{"type": "image", "image": image}, {"type": "text", "text": PROMPT}]
        return [{"role": "user", "content": question}, {"role": "assistant", "content": self.answer}]

    @property
    def encoded(self) -> str:
        return base64.b64encode(self.picture).decode()


Way = Callable[[Sequence[Item]], list[float]]


def measure(options: argparse.Namespace) -> list[Row]:
    rounds, size = (1, "tiny") if options.quick else (ROUNDS, "h512")
    with runs.workplace() as folder:
        checkpoint = str(reward_checkpoint(folder, configuration(size)))
        scorer = load_local_scorer(checkpoint)
        with (
            server(*SERVE, "--model", checkpoint, "--port", log=folder / "service.log") as (service, _),
            server("-m", "benchmarks.plain_server", checkpoint, log=folder / "plain.log") as (plain, _),
        ):
            return [
                concurrent(scorer, service, 2 if options.quick else EACH, rounds),
                low_load(scorer, service, 3 if options.quick else ALONE),
                rl_load(service, plain, 1 if options.quick else GROUPS, rounds),
            ]


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
    """Time one conversation at a time, by the scorer and the service in turn."""
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
    return row("low_load", added, "ms added", at_most=ADDED_MS, offline_ms=medians["offline"])


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


def offline(scorer: LocalScorer, items: Sequence[Item]) -> list[float]:
    return scorer.score([question.conversation({"bytes": question.picture}) for question in items])


def together(url: str, items: Sequence[Item], ask: Callable[..., Any]) -> list[float]:
    """Return the score of each item, a request per item, 64 at a time."""

    async def scores() -> list[float]:
        async with client(url) as asker:
            return await in_turn(CLIENTS, items, lambda question: ask(asker, question))

    return asyncio.run(scores())


async def native(asker: httpx.AsyncClient, question: Item) -> float:
    messages = question.conversation(f"data:image/png;base64,{question.encoded}")
    answer = await asker.post("/v1/rewards", json={"items": [{"messages": messages}]})
    return answer.raise_for_status().json()["data"][0]["raw"]


async def compute(asker: httpx.AsyncClient, question: Item) -> float:
    columns = {"prompt": [PROMPT], "image": [question.encoded], "response": [question.answer]}
    answer = await asker.post("/compute", json=columns)
    return answer.raise_for_status().json()["rewards"][0]


def item(image: bytes) -> Item:
    """Return an item with a unique answer."""
    return Item(image, ANSWER.format(next(number)))


def group() -> list[Item]:
    """Return candidates for one image."""
    image = picture(LARGE)
    return [item(image) for _ in range(CANDIDATES)]


def picture(side: int) -> bytes:
    """Return a unique image as a PNG file."""
    pixels = np.random.default_rng(next(number)).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    harness.main("serving", measure, __doc__)
