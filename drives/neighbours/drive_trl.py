"""TRL: steps of GRPO and RLOO on a tiny vision-language policy, rewarded by our functions; some on two ranks."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from breaks import BreaksOne
from checks import (
    GUIDES_QUESTION,
    QUESTION,
    RANKS,
    Case,
    gdpo,
    guide,
    main,
    many_rewards,
    on_ranks,
    raised,
    ran,
    scored,
)
from datasets import Dataset
from PIL import Image
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from vlmrm.adapters.trl_reward import TRLReward, TRLRewardSet

GROUP = 4
QUICK = {
    "max_completion_length": 6,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "log_completions": True,
}


def step(
    case: Case,
    rewards: Sequence[Callable[..., Any]],
    trainer: Any = GRPOTrainer,
    config: Any = GRPOConfig,
    each: int = 2 * GROUP,
    **options: Any,
) -> Any:
    """Train one step on two prompts with so many rollouts on each rank, and return the trainer."""
    prompt = [{"role": "user", "content": QUESTION}]
    data = [{"prompt": prompt, "image": Image.open(picture)} for picture in case.pictures]
    trained = trainer(
        case.policy,
        args=config(
            output_dir=tempfile.mkdtemp(dir=case.folder),
            per_device_train_batch_size=each,
            max_steps=1,
            **{"num_generations": GROUP, **QUICK, **options},
        ),
        reward_funcs=list(rewards),
        train_dataset=Dataset.from_list(data),
    )
    trained.train()
    return trained


def shown(case: Case, image: Any) -> str:
    """The file of a picture that TRL logged."""
    pixels = image.convert("RGB").tobytes()
    files = [*case.pictures, *map(str, Path.cwd().glob("*.jpg"))]
    [file] = [one for one in files if Image.open(one).convert("RGB").tobytes() == pixels]
    return file


def rows_of(case: Case, logs: Any, reward: str = "people", question: str = QUESTION) -> list[dict[str, Any]]:
    """The conversations and rewards that TRL logged."""
    columns = (logs["images"], logs["completion"], logs["rewards"][reward])
    return [
        scored(shown(case, images[0]), completion[0]["content"], value, question)
        for images, completion, value in zip(*columns, strict=True)
    ]


def of_guide(case: Case) -> dict[str, Any]:
    names: dict[str, Any] = {}
    with patch("trl.GRPOConfig", partial(GRPOConfig, max_steps=2, **QUICK)):
        exec(guide(case, "GRPOTrainer("), names)
    rows = rows_of(case, names["trainer"]._logs, question=GUIDES_QUESTION)
    return ran("`TRLReward` of a checkpoint: 2 steps of GRPO", rows)


def guide_set(case: Case) -> dict[str, Any]:
    """As one function, and one by one; six tokens repeat nothing."""
    names: dict[str, Any] = {}
    exec(guide(case, "TRLRewardSet("), names)
    rewards = names["rewards"]
    how = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": rewards.weights()}
    rows = rows_of(case, step(case, [rewards], num_generations=8)._logs, "vlmrm")
    rows += rows_of(case, step(case, rewards.each(), num_generations=8, **how)._logs)
    return ran("`TRLRewardSet` of a service: a step of GRPO and one of GDPO", rows)


def equal(case: Case) -> list[dict[str, Any]]:
    ways = ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig))
    return [row for way in ways for row in rows_of(case, step(case, [TRLReward(case.url, name="people")], *way)._logs)]


def rank(number: int, case: Case) -> list[Any]:
    """What TRL gathers of ranks with half of one picture's group each: rows and advantages, and with a broken sample.

    It is the last rank's second, the last of the group, that cannot be scored then.
    """
    gathered = []
    for model in (case.url, BreaksOne(case.url) if number == RANKS - 1 else case.url):
        logs = step(case, [TRLReward(model, name="people")], each=GROUP // RANKS)._logs
        gathered.append({"rows": rows_of(case, logs), "advantages": list(logs["advantages"])})
    return gathered


@cache
def gathered(case: Case) -> list[Any]:
    return on_ranks(rank, case)[0]


def ranks(case: Case) -> list[dict[str, Any]]:
    whole, _ = gathered(case)
    rewards = torch.tensor([row["reward"] for row in whole["rows"]])
    assert len({json.dumps(row["messages"][:1]) for row in whole["rows"]}) == 1, "the group is not of one picture"
    assert len(rewards) == GROUP and rewards.std() > 1e-4, rewards
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # GRPO's, over the whole group
    assert torch.allclose(torch.tensor(whole["advantages"]), expected, atol=1e-4), (whole, expected)
    return whole["rows"]


def ranks_broken(case: Case) -> str:
    _, missing = gathered(case)
    *others, advantage = missing["advantages"]
    assert abs(advantage) < 1e-3, f"a broken sample has the advantage {advantage:.3g}"
    assert any(abs(one) > 1e-2 for one in others), others
    return "a broken sample gets its group's mean: advantage 0"


def broken(case: Case) -> str:
    logs = step(case, [TRLReward(BreaksOne(case.url), name="people")])._logs
    rewards, advantages = list(logs["rewards"]["people"]), list(logs["advantages"])
    others = [rewards[0], *rewards[2:GROUP]]
    assert math.isclose(rewards[1], sum(others) / len(others), abs_tol=1e-5), rewards
    assert abs(advantages[1]) < 1e-3, advantages
    assert any(abs(one) > 1e-2 for one in advantages), advantages
    return "its group's mean: advantage 0"


def of_many(case: Case) -> list[dict[str, Any]]:
    """Rewards one by one, as TRL's GDPO takes them, of which one lacks a sample."""
    rewards = TRLRewardSet(many_rewards(case, "breaks.VlmRewardButOne", case.model), GROUP)
    how = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": rewards.weights()}
    logs = step(case, rewards.each(), **how)._logs
    rows = rows_of(case, logs)
    pictures = [row["messages"][0]["content"][0]["image"] for row in rows]
    brevity = [float(len(row["messages"][1]["content"]) <= 12) for row in rows]
    assert list(logs["rewards"]["brief"]) == brevity, (logs["rewards"], brevity)
    columns = {"people": [row["reward"] for row in rows], "brief": brevity}
    columns["people"][1] = math.nan
    expected = gdpo(columns, pictures, epsilon=1e-4)
    assert np.allclose(list(logs["advantages"]), expected, atol=1e-4), (logs["advantages"], expected)
    return [rows[0], *rows[2:]]


def away(case: Case) -> str:
    return raised(lambda: step(case, [TRLReward(case.away, name="people")]), case.away)


CHECKS: dict[str, Callable[[Case], Any]] = {
    "guide": of_guide,
    "guide_set": guide_set,
    "equal": equal,
    "broken": broken,
    "away": away,
    "ranks": ranks,
    "ranks_broken": ranks_broken,
    "gdpo": of_many,
}

if __name__ == "__main__":
    main(CHECKS)
