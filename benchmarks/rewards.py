"""Rewards: a group's candidates at once over one by one, four judges over one, and a reward set over its models alone.

Judges wait, so `async_judges` is timed by the clock on the wall; the others by the processor's. `same_picture_64` is
the share of the wall time in which the picture of 64 rollouts is hashed.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from benchmarks.judge_server import LATENCY, judge_server
from benchmarks.shapes import configuration, reward_checkpoint
from vlmrm.rewards import RewardSet

SIDE = 448  # pixels: 256 tokens
PROMPT = "What is shown in this picture, and how is it drawn? Say it in one sentence."
ANSWER = "There are {} blots in this picture, of several colours, that lie beside each other."
GROUPWISE, JUDGES, OVERHEAD, HASHING = 6.0, 1.3, 1.05, 0.05
CANDIDATES, BATCH, JUDGED = 16, 64, 16
LARGE_SIDE = 1024  # pixels of a picture that a diffusion model draws
ROUNDS = 5


def measure(options: argparse.Namespace) -> list[Row]:
    rounds = 1 if options.quick else ROUNDS
    with runs.workplace() as folder:
        checkpoint = reward_checkpoint(folder, configuration("tiny" if options.quick else "h512"))
        return [groupwise(checkpoint, rounds), judges(rounds), overhead(checkpoint, rounds),
                same_picture(folder, rounds)]  # fmt: skip


def groupwise(checkpoint: Path, rounds: int) -> Row:
    """Time a group of answers to a question about an image, all at once and one by one."""
    group, single = trained(checkpoint, "vlm_reward_group"), trained(checkpoint, "vlm_reward")
    columns = answers(CANDIDATES)

    def one_by_one() -> None:
        for index in range(CANDIDATES):
            single(**{name: column[index : index + 1] for name, column in columns.items()})

    ways = {"one_by_one": lambda: one_by_one, "group": lambda: lambda: group(**columns, groups=[0] * CANDIDATES)}
    timings = harness.interleave(ways, rounds)
    line = row(f"groupwise_{CANDIDATES}", **timings.ratio("one_by_one", "group"), unit="x", at_least=GROUPWISE)
    return line | {"slow_seconds": timings.median("one_by_one"), "fast_seconds": timings.median("group")}


def judges(rounds: int) -> Row:
    """Time four judges and one on the same images, new ones in each round, so that no reply is cached."""
    with judge_server() as url:
        sets = {name: RewardSet([judge(url, number) for number in range(count)])
                for name, count in (("four", 4), ("one", 1))}  # fmt: skip
        pictures = np.random.default_rng(0)

        def prepare(rewards: RewardSet) -> Callable[[], Any]:
            images = [Image.fromarray(pictures.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(JUDGED)]
            return lambda: rewards(prompt=[PROMPT] * JUDGED, image=images)

        ways = {name: lambda rewards=rewards: prepare(rewards) for name, rewards in sets.items()}
        timings = harness.interleave(ways, rounds, device="wall")
        for rewards in sets.values():
            rewards.close()
    line = row("async_judges", **timings.ratio("four", "one"), unit="x one", at_most=JUDGES)
    return line | {"slow_seconds": timings.median("four"), "fast_seconds": timings.median("one"), "latency": LATENCY}


def overhead(checkpoint: Path, rounds: int) -> Row:
    """Time a batch through a reward set, with its checks and conversions, and through the model itself."""
    rewards = trained(checkpoint, "vlm_reward")
    model = rewards.rewards[0].model
    columns = answers(BATCH)
    ways = {"set": lambda: lambda: rewards(**columns), "model": lambda: lambda: model(**columns)}
    timings = harness.interleave(ways, rounds)
    line = row("overhead", **timings.ratio("set", "model"), unit="x model", at_most=OVERHEAD)
    return line | {"slow_seconds": timings.median("set"), "fast_seconds": timings.median("model")}


def same_picture(folder: Path, rounds: int) -> Row:
    """Return the share of the wall time that hashing takes where 64 rollouts are about one picture.

    The model is tiny, so that the share is the largest that it can be.
    """
    rewards = trained(reward_checkpoint(folder / "tiny", configuration("tiny")), "vlm_reward")
    columns = answers(BATCH, LARGE_SIDE)
    rewards(**columns)
    shares = []
    for _ in range(rounds):
        profile = cProfile.Profile()
        profile.runcall(rewards, **columns)
        stats = pstats.Stats(profile)
        whole: float = stats.total_tt  # ty: ignore[unresolved-attribute]
        functions: dict[Any, Any] = stats.stats  # ty: ignore[unresolved-attribute]
        hashing = sum(
            cumulative for (_, _, name), (_, _, _, cumulative, _) in functions.items() if name == "media_key"
        )
        shares.append(hashing / whole)
    return row(f"same_picture_{BATCH}", statistics.median(shares), unit="of the wall time", at_most=HASHING)


def trained(checkpoint: Path, reward_model: str) -> RewardSet:
    settings = {"dtype": "float32", "device": "cpu", "batch_size": BATCH, "model_path": str(checkpoint)}
    return RewardSet({"name": "trained", "reward_model": reward_model, **settings})


def judge(url: str, number: int) -> dict[str, Any]:
    """Return the configuration of a judge; another model name on the server makes another judge."""
    settings = {"reward_model": "vllm_evaluate", "api_base_url": url, "vlm_model": f"judge-{number}"}
    return {"name": f"judge_{number}", "batch_size": JUDGED, "async_reward": True, **settings}


def answers(count: int, side: int = SIDE) -> dict[str, list[Any]]:
    """`count` answers to one question about one picture."""
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)
    responses = [ANSWER.format(number) for number in range(count)]
    return {"prompt": [PROMPT] * count, "image": [picture] * count, "response": responses}


if __name__ == "__main__":
    harness.main("rewards", measure, __doc__)
