"""Candidates of many pictures in any order, a request each: what the service computes of them, as its workers count.

The order is that of trainers whose samples finish when they do. Time is not measured: it depends on the machine.
"""

from __future__ import annotations

import random
import re
from typing import Any

import httpx2 as httpx
import numpy as np

from benchmarks.harness import Row, row
from benchmarks.serving.clients import CANDIDATES, Item, group, native, offline, together
from benchmarks.serving.throughput import TOLERANCE
from vlmrm.scoring.scorer import LocalScorer

GROUPS = 16
PICTURES, TOKENS = 1.25, 1.15  # of what all requests at once would need


def shuffled(scorer: LocalScorer, service: str, groups: int = GROUPS) -> list[Row]:
    """Count the pictures and tokens that the service computes for 16 answers to each picture, 64 clients at a time."""
    items = [item for _ in range(groups) for item in group()]
    random.Random(0).shuffle(items)
    before = computed(service)
    scores = together(service, items, native)
    counts = {name: count - before.get(name, 0) for name, count in computed(service).items()}
    if not np.allclose(scores, offline(scorer, items), atol=TOLERANCE):
        raise AssertionError("the service has other scores than the scorer: there is nothing to compare")
    ideal = ideal_tokens(scorer, items)
    name = f"shuffled_groups_{groups * CANDIDATES}"
    return [
        row(f"{name}_pictures", counts["pictures"] / groups, "x ideal", at_most=PICTURES),
        row(f"{name}_tokens", counts["tokens"] / ideal, "x ideal", at_most=TOKENS, ideal=ideal),
    ]


def computed(service: str) -> dict[str, float]:
    """Return what the workers have computed since they started."""
    page = httpx.get(f"{service}/metrics").text
    found = re.findall(r'^vlmrm_computed_total\{reward="[^"]*",what="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {name: float(count) for name, count in found}


def ideal_tokens(scorer: LocalScorer, items: list[Item]) -> int:
    """Return the tokens of each prompt and each answer, once."""
    counts = {"all": 0}

    def count(module: object, given: object, inputs: dict[str, Any]) -> None:
        counts["all"] += inputs["input_ids"].numel()

    hook = scorer.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        by_picture: dict[bytes, list[Item]] = {}
        for item in items:
            by_picture.setdefault(item.picture, []).append(item)
        for candidates in by_picture.values():
            offline(scorer, candidates)
    finally:
        hook.remove()
    return counts["all"]
