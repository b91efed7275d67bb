"""What the clients of the service send: new pictures and answers, and how they ask for their scores."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import numpy as np
from PIL import Image

from benchmarks.servers import client, in_turn
from vlmrm.scoring.scorer import LocalScorer

PROMPT = "What is shown in this picture, and how is it drawn? Say it in one sentence."
ANSWER = "There are {} blots in this picture, of several colours, that lie beside each other."
SMALL, LARGE = 224, 448  # pixels: 64 and 256 tokens
CLIENTS = 64
CANDIDATES = 16

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


def offline(scorer: LocalScorer, items: Sequence[Item]) -> list[float]:
    return scorer.score([question.conversation({"bytes": question.picture}) for question in items])


def together(url: str, items: Sequence[Item], ask: Callable[..., Any], clients: int = CLIENTS) -> list[float]:
    """Return the score of each item, a request per item, as many at a time as there are clients."""

    async def scores() -> list[float]:
        async with client(url) as asker:
            return await in_turn(clients, items, lambda question: ask(asker, question))

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
