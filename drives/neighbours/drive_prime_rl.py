"""prime-rl: its GRPO of episodes whose traces the task of examples has scored; the verifiers are its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import verifiers.v1 as vf
from checks import Case, main, scored
from drive_verifiers import rollout, task
from prime_rl.configs.algorithm import GRPOAlgoConfig
from prime_rl.orchestrator.algo import build_algorithm
from prime_rl.orchestrator.algo.base import iter_trainable_traces
from prime_rl.orchestrator.algo.routing import scalar_advantage


async def episode(case: Case, url: str, picture: str, answer: str) -> vf.Episode:
    """An episode of one trace, which an error of its reward marks as the environment's own end of a rollout does."""
    one = task(url, case.folder)
    trace = rollout(one, picture, answer)
    for node in trace.nodes:
        node.token_ids, node.mask = [1, 2], [node.sampled] * 2
    try:
        await one.score(trace)
    except vf.TaskError as error:
        trace.record_error(error)
    trace.ok = not trace.errors
    return vf.Episode(task=trace.task, traces=[trace])


def group(case: Case, url: str, rows: list[tuple[str, str]]) -> list[vf.Episode]:
    """The episodes of a group, with the advantages that its algorithm gives them."""

    async def assigned() -> list[vf.Episode]:
        episodes = [await episode(case, url, *row) for row in rows]
        algorithm = build_algorithm(GRPOAlgoConfig(), None)
        for one in episodes:
            await algorithm.finalize_episode(one)
        if any(iter_trainable_traces(episodes)):
            await algorithm.finalize_group(episodes)
        return episodes

    return asyncio.run(assigned())


def equal(case: Case) -> list[dict[str, Any]]:
    found = []
    for picture in case.pictures:
        rows = [row for row in case.rows() if row[0] == picture]
        traces = [one.traces[0] for one in group(case, case.url, rows)]
        rewards = np.array([trace.reward for trace in traces])
        advantages = [scalar_advantage(trace) for trace in traces]
        assert np.allclose(advantages, rewards - rewards.mean(), atol=1e-6) and min(map(abs, advantages)) > 1e-4
        found += [scored(*row, reward) for row, reward in zip(rows, rewards, strict=True)]
    return found


def broken(case: Case) -> str:
    rows = case.rows()[:2]
    episodes = group(case, case.url, [*rows, (case.broken, "Red")])
    *others, last = [one.traces[0] for one in episodes]
    assert scalar_advantage(last) is None and "sample 0" in str(last.last_error), last.errors
    rewards = np.array([trace.reward for trace in others])
    assert np.allclose([scalar_advantage(trace) for trace in others], rewards - rewards.mean(), atol=1e-6)
    return "its episode has an error and is left out of its group"


def away(case: Case) -> str:
    episodes = group(case, case.away, case.rows()[:2])
    assert all("cannot be reached" in str(one.traces[0].last_error) for one in episodes), episodes
    assert not any(iter_trainable_traces(episodes))
    return "all episodes have errors, and nothing is trained"


if __name__ == "__main__":
    main({"equal": equal, "broken": broken, "away": away})
