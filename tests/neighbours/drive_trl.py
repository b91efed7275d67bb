"""TRL: steps of GRPO and RLOO on a tiny vision-language policy, rewarded through TRLReward; one on two ranks."""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checks import QUESTION, Case, main, raised, scored
from datasets import Dataset
from PIL import Image
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from vlmrm.adapters.trl_reward import AsyncTRLReward, TRLReward
from vlmrm.errors import RowError
from vlmrm.scoring import load_scorer

GROUP = 4
RANKS = 2


class BreaksOne:
    """A service whose answer to the second of a call's conversations is an error."""

    def __init__(self, url: str):
        self.scorer = load_scorer(url)

    def score_each(self, conversations: Sequence[Any]) -> list[float | RowError]:
        scores = self.scorer.score_each(conversations)
        scores[1] = RowError("the picture is broken")
        return scores


def step(
    case: Case, reward: TRLReward, trainer: Any = GRPOTrainer, config: Any = GRPOConfig, each: int = 2 * GROUP
) -> Any:
    """Train one step on two prompts with so many rollouts on each rank, and return the trainer."""
    prompt = [{"role": "user", "content": QUESTION}]
    data = [{"prompt": prompt, "image": Image.open(picture)} for picture in case.pictures]
    trained = trainer(
        case.policy,
        args=config(
            output_dir=tempfile.mkdtemp(dir=case.folder),
            per_device_train_batch_size=each,
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


def rank(number: int, port: int, case: Case, file: str, breaks: bool) -> None:
    """Be one of the ranks, each with half of one picture's group; the first writes what TRL gathered.

    With `breaks` the last one's second sample, the last of the group, cannot be scored.
    """
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = BreaksOne(case.url) if breaks and number == RANKS - 1 else case.url
    trained = step(case, TRLReward(model, name="people"), each=GROUP // RANKS)
    assert trained.accelerator.num_processes == RANKS
    if number == 0:
        logs = trained._logs
        rows = [
            scored(shown(case, images[0]), completion[0]["content"], value)
            for images, completion, value in zip(
                logs["images"], logs["completion"], logs["rewards"]["people"], strict=True
            )
        ]
        Path(file).write_text(json.dumps({"rows": rows, "advantages": list(logs["advantages"])}), encoding="utf-8")
    torch.distributed.destroy_process_group()


def gathered_of_ranks(case: Case, breaks: bool) -> dict[str, Any]:
    """Return the rows and the advantages that TRL gathered of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = Path(case.folder, "ranks.json")
    torch.multiprocessing.spawn(rank, (port, case, str(file), breaks), nprocs=RANKS)
    return json.loads(file.read_text(encoding="utf-8"))


def ranks(case: Case) -> list[dict[str, Any]]:
    gathered = gathered_of_ranks(case, breaks=False)
    rewards = torch.tensor([row["reward"] for row in gathered["rows"]])
    assert len({json.dumps(row["messages"][:1]) for row in gathered["rows"]}) == 1, "the group is not of one picture"
    assert len(rewards) == GROUP and rewards.std() > 1e-4, rewards
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # GRPO's, over the whole group
    assert torch.allclose(torch.tensor(gathered["advantages"]), expected, atol=1e-4), (gathered, expected)
    return gathered["rows"]


def ranks_broken(case: Case) -> str:
    *_, advantage = gathered_of_ranks(case, breaks=True)["advantages"]
    assert abs(advantage) < 1e-3, f"a broken sample has the advantage {advantage:.3g}"
    return "a broken sample gets its group's mean: advantage 0"


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


CHECKS: dict[str, Callable[[Case], Any]] = {
    "equal": equal,
    "broken": broken,
    "away": away,
    "ranks": ranks,
    "ranks_broken": ranks_broken,
}

if __name__ == "__main__":
    main(CHECKS)
