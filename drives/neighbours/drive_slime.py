"""slime: its remote reward, one at a time and a group at once, whose samples carry their pictures in their labels."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from checks import QUESTION, Case, data_uri, main, raised, scored
from slime.rollout import rm_hub
from slime.utils.types import Sample

LOOP = asyncio.Runner()  # its client keeps a session


def arguments(url: str) -> Any:
    return SimpleNamespace(rm_type="remote_rm", rm_url=f"{url}/remote_rm", custom_rm_path=None)


def sample(picture: str, answer: str) -> Sample:
    image = data_uri(picture)
    prompt = [{"role": "user", "content": f"<image>{QUESTION}"}]
    return Sample(prompt=prompt, response=answer, label={"images": [image]})


def equal(case: Case) -> list[dict[str, Any]]:
    async def rewards() -> list[Any]:
        args = arguments(case.url)
        made = [sample(*row) for row in case.rows()]
        alone = [await rm_hub.async_rm(args, one) for one in made]
        return [*alone, *await rm_hub.batched_async_rm(args, made)]

    return [scored(*row, reward) for row, reward in zip(2 * case.rows(), LOOP.run(rewards()), strict=True)]


def broken(case: Case) -> str:
    async def reward() -> Any:
        return await rm_hub.remote_rm(arguments(case.url), sample(case.broken, "It is red."), max_retries=1)

    return raised(lambda: LOOP.run(reward()), "400")


def away(case: Case) -> str:
    async def reward() -> Any:
        return await rm_hub.remote_rm(arguments(case.away), sample(*case.rows()[0]), max_retries=1)

    return raised(lambda: LOOP.run(reward()), "Cannot connect")


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
