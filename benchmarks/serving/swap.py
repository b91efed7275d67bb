"""Another model while requests come: none is lost, and each score is by the revision that the answer names."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.harness import Row, row
from benchmarks.servers import SERVE, server

GAP_S = 1.0
CLIENTS = 8
TOKEN = "operator"
CONFIG = """
admin_token = "{token}"
model_roots = ["{folder}"]
[limits]
result_ttl = 0
[[reward_args]]
reward_type = "constant"
engine = "trivial.Constant"
import_from = ["{source}"]
model_path = "{first}"
"""


def swap(folder: Path, swaps: int) -> Row:
    """Measure so many swaps between models with known scores, under the load of `CLIENTS` clients."""
    models = [folder / f"constant-{score}" for score in range(2)]
    for score, path in enumerate(models):
        path.mkdir()
        (path / "score.txt").write_text(str(score))
    config = folder / "swap.toml"
    source = Path(__file__).parent
    config.write_text(CONFIG.format(token=TOKEN, folder=folder, source=source, first=models[0]))
    with server(*SERVE, "--config", str(config), "--port", log=folder / "swap.log") as (url, _):
        answers, scores = asyncio.run(_swap(url, [str(path) for path in models], swaps))
    moments = [moment for moment, _, _ in answers]
    gap = max(later - earlier for earlier, later in itertools.pairwise(moments))
    lost = sum(status != 200 for _, status, _ in answers)
    wrong = sum(body["data"][0]["score"] != scores[body["revision"]] for _, status, body in answers if status == 200)
    measured = gap if not lost and not wrong else float("inf")
    return row("swap", measured, "s without an answer", at_most=GAP_S, swaps=swaps, lost=lost, wrong=wrong) | {
        "answers": len(answers)
    }


async def _swap(
    url: str, models: list[str], swaps: int
) -> tuple[list[tuple[float, int, dict[str, Any]]], dict[str, float]]:
    """Return when each answer came, its status and body; and the score of each revision."""
    answers: list[tuple[float, int, dict[str, Any]]] = []
    scores: dict[str, float] = {}
    stop = asyncio.Event()

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def load(number: int) -> None:
            while not stop.is_set():
                body = {"items": [{"prompt": f"{number} {time.perf_counter()}"}]}
                answer = await client.post("/v1/rewards", json=body)
                answers.append((time.perf_counter(), answer.status_code, answer.json()))

        async def put(number: int) -> None:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            body = {"model": models[number % 2]}
            changed = await client.put("/v1/rewards/constant/model", json=body, headers=headers)
            changed.raise_for_status()
            [revision] = changed.json()["revisions"]
            scores[revision] = float(number % 2)

        await put(0)
        loads = [asyncio.create_task(load(number)) for number in range(CLIENTS)]
        for number in range(1, swaps + 1):
            await put(number)
        stop.set()
        await asyncio.gather(*loads)
    return answers, scores
