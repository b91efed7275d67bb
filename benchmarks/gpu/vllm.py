"""vLLM's classify beside the service: one checkpoint, written by `vlmrm export`, and groups of 16 candidates.

Both servers run at the same time, each with a share of the GPU's memory, and take turns in being asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx2 as httpx
import numpy as np

from benchmarks import harness, runs
from benchmarks.gpu.models import checkpoint
from benchmarks.gpu.running import Run, Unequal, needed, release
from benchmarks.harness import Row, row
from benchmarks.servers import SERVE, client, in_turn, server
from benchmarks.serving.clients import CANDIDATES, LARGE, Item, item, native, picture
from vlmrm.export import export

GROUPS = 4
NAME = "reward"
APART = 0.05  # of the scores' spread: the rounding of bfloat16 in two programs, several times
# `vllm serve MODEL` from this interpreter, whose folder of programs need not be on PATH.
PROGRAM = ("-m", "vllm.entrypoints.cli.main", "serve")
OPTIONS = ("--runner", "pooling", "--convert", "classify", "--pooler-config", json.dumps({"use_activation": False}))
MEMORY = ("--gpu-memory-utilization", "0.45", "--max-model-len", "8192")


def vllm(run: Run) -> None:
    """Ask both for the scores of groups of 16 candidates about one picture."""
    run.attempt(f"groups of {CANDIDATES}", partial(beside, run))


def beside(run: Run, program: Sequence[str] = PROGRAM) -> Iterator[Row]:
    """Yield the throughput of vLLM over the service's, and how far their scores lie apart.

    Raises:
        Unequal: when that is more than rounding.
    """
    if program is PROGRAM:
        needed("vllm")
    source = checkpoint(run.scratch, "3b", run.device, run.tiny)
    exported = run.scratch / f"{source.parent.name}-exported"
    if not (exported / "COMPLETE.json").is_file():
        shutil.rmtree(exported, ignore_errors=True)
        export(source, exported)
        release(run.device)
    asked = [*program, str(exported), "--served-model-name", NAME, *OPTIONS, *MEMORY, "--port"]
    os.environ["HF_HUB_OFFLINE"] = "1"
    with (
        runs.workplace() as folder,
        server(*SERVE, "--model", str(source), "--port", log=folder / "service.log", one_thread=False) as (ours, _),
        server(*asked, log=folder / "vllm.log", ready="/health", one_thread=False) as (theirs, _),
    ):
        ways = {"service": partial(scores, ours, native), "vllm": partial(scores, theirs, classified)}
        yield from compared(ways, 1 if run.tiny else GROUPS, run.rounds)


def compared(ways: Mapping[str, Callable[[list[Item]], list[float]]], groups: int, rounds: int) -> Iterator[Row]:
    """Yield the rows of ways to score the same new groups in turn."""
    made: dict[str, list[float]] = {name: [] for name in ways}
    items: list[Item] = []

    def prepare(name: str) -> Callable[[], Any]:
        nonlocal items
        if name == next(iter(ways)):
            items = [item(image) for image in [picture(LARGE) for _ in range(groups)] for _ in range(CANDIDATES)]
        return lambda: made[name].extend(ways[name](items))

    timings = harness.interleave({name: partial(prepare, name) for name in ways}, rounds, "wall")
    ours, theirs = (np.array(made[name]) for name in ("service", "vllm"))
    apart = float(np.abs((ours - ours.mean()) - (theirs - theirs.mean())).max() / ours.std())
    offset = float(abs(ours.mean() - theirs.mean()) / ours.std())
    line = row(f"groups of {CANDIDATES}", **timings.ratio("vllm", "service"), unit="x vLLM")
    yield line | {f"{name}_per_second": groups * CANDIDATES / timings.median(name) for name in timings.seconds}
    correlation = float(np.corrcoef(ours, theirs)[0, 1])
    if not correlation > 0.9:
        raise Unequal(f"the scores of vLLM and the service correlate by {correlation:.3f}: they are of other inputs")
    yield row("scores apart", apart, "of the spread", at_most=APART, offset=offset, correlation=correlation)


def scores(url: str, ask: Callable[..., Any], items: list[Item]) -> list[float]:
    """Return the score of each item, a request for each, all at the same time."""

    async def together() -> list[float]:
        async with client(url) as asker:
            return await in_turn(len(items), items, lambda question: ask(asker, question))

    return asyncio.run(together())


async def classified(asker: httpx.AsyncClient, question: Item) -> float:
    """Return the raw logit that vLLM's classify gives an item."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{question.encoded}"}}
    messages = question.conversation(None)
    messages[0]["content"][0] = image
    body = {"model": NAME, "messages": messages, "use_activation": False}
    answer = await asker.post("/classify", json=body)
    return answer.raise_for_status().json()["data"][0]["probs"][0]
