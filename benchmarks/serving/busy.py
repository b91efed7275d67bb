"""How much of the time the worker computes while 16 clients send pictures as they come from cameras and generators,
each its next one when the last is answered: what the service does beside the model should not keep it waiting.
"""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Sequence

import httpx2 as httpx
import numpy as np
from PIL import Image

from benchmarks.harness import Row, row
from benchmarks.serving.clients import Item, item, native, number, offline, together
from benchmarks.serving.throughput import TOLERANCE
from vlmrm.scoring.scorer import LocalScorer

CLIENTS = 16
LEAST = 0.9
SIZES = ((448, 448, "JPEG"), (640, 480, "PNG"), (1024, 768, "JPEG"), (1024, 768, "PNG"))


def worker_busy(scorer: LocalScorer, service: str, per_client: int, rounds: int) -> Row:
    """Measure the share of the time in which the worker computes, by its own count."""
    shares, rates = [], []
    for measured in range(rounds + 1):
        items = [item(photo(*size)) for size in itertools.islice(itertools.cycle(SIZES), CLIENTS * per_client)]
        before, started = compute_seconds(service), time.perf_counter()
        scores = together(service, items, native, CLIENTS)
        seconds = time.perf_counter() - started
        if measured:
            shares.append((compute_seconds(service) - before) / seconds)
            rates.append(len(items) / seconds)
    check(scorer, items[:CLIENTS], scores[:CLIENTS])
    return row(
        "worker_busy",
        float(np.median(shares)),
        "of the time",
        at_least=LEAST,
        lowest=min(shares),
        highest=max(shares),
        items_per_s=float(np.median(rates)),
    )


def check(scorer: LocalScorer, items: Sequence[Item], scores: Sequence[float]) -> None:
    if not np.allclose(scores, offline(scorer, items), atol=TOLERANCE):
        raise AssertionError("the service has other scores than the scorer: there is nothing to compare")


def compute_seconds(service: str) -> float:
    """Return the seconds that the workers have computed since they started."""
    page = httpx.get(f"{service}/metrics").text
    return sum(map(float, re.findall(r"^vlmrm_compute_seconds_total\S* (\S+)$", page, re.MULTILINE)))


def photo(width: int, height: int, form: str) -> bytes:
    """Return a unique picture with detail at several scales, as a file."""
    chance = np.random.default_rng(next(number))
    pixels = np.zeros((height, width, 3))
    for scale in (8, 64, 512):
        coarse = chance.integers(0, 85, (max(height // scale, 2), max(width // scale, 2), 3), dtype=np.uint8)
        pixels += np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, form)
    return file.getvalue()
