"""TRL: steps of GRPO and RLOO on a tiny vision-language policy, rewarded through TRLReward."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from checks import QUESTION, Case, main, raised, scored
from datasets import Dataset
from PIL import Image
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from vlmrm.adapters.trl_reward import AsyncTRLReward, TRLReward
from vlmrm.errors import RowError
from vlmrm.scoring import load_scorer

GROUP = 4


class BreaksOne:
    """A service whose answer to the second of a call's conversations is an error."""

    def __init__(self, url: str):
        self.scorer = load_scorer(url)

    def score_each(self, conversations: Sequence[Any]) -> list[float | RowError]:
        scores = self.scorer.score_each(conversations)
        scores[1] = RowError("the picture is broken")
        return scores


def step(case: Case, reward: TRLReward, trainer: Any = GRPOTrainer, config: Any = GRPOConfig) -> Any:
    """Train one step on two prompts, and return the trainer."""
    prompt = [{"role": "user", "content": QUESTION}]
    data = [{"prompt": prompt, "image": Image.open(picture)} for picture in case.pictures]
    trained = trainer(
        case.policy,
        args=config(
            output_dir=tempfile.mkdtemp(dir=case.folder),
            per_device_train_batch_size=2 * GROUP,
            num_generations=GROUP,
            max_completion_length=6,
            max_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            log_completions=True,
        ),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(data),
    )
    trained.train()
    return trained


def shown(case: Case, image: Any) -> str:
    """The file of a picture that TRL logged."""
    pixels = image.convert("RGB").tobytes()
    [file] = [one for one in case.pictures if Image.open(one).convert("RGB").tobytes() == pixels]
    return file


def equal(case: Case) -> list[dict[str, Any]]:
    rows = []
    for reward, *kind in (
        (TRLReward, GRPOTrainer, GRPOConfig),
        (AsyncTRLReward, GRPOTrainer, GRPOConfig),
        (TRLReward, RLOOTrainer, RLOOConfig),
    ):
        logs = step(case, reward(case.url, name="people"), *kind)._logs
        rows += [
            scored(shown(case, images[0]), completion[0]["content"], value)
            for images, completion, value in zip(
                logs["images"], logs["completion"], logs["rewards"]["people"], strict=True
            )
        ]
    return rows


def broken(case: Case) -> str:
    logs = step(case, TRLReward(BreaksOne(case.url), name="people"))._logs
    rewards, advantages = list(logs["rewards"]["people"]), list(logs["advantages"])
    others = [rewards[0], *rewards[2:GROUP]]
    assert math.isclose(rewards[1], sum(others) / len(others), abs_tol=1e-5), rewards
    assert abs(advantages[1]) < 1e-3, advantages
    assert any(abs(one) > 1e-2 for one in advantages), advantages
    return "its group's mean: advantage 0"


def away(case: Case) -> str:
    return raised(lambda: step(case, TRLReward(case.away, name="people")), case.away)


CHECKS: dict[str, Callable[[Case], Any]] = {"equal": equal, "broken": broken, "away": away}

if __name__ == "__main__":
    main(CHECKS)
