"""Run by test_ranks under torchrun: groups that lie across the ranks, and a judge that fails on one of them.

Prints one line of JSON a rank: rewards, advantages, metrics, and the error of the failing round.
"""

from __future__ import annotations

import json
import sys

from accelerate import PartialState
from accelerate.utils import gather_object

from vlmrm.adapters.swift_orm import VlmrmORM
from vlmrm.adapters.trl_reward import TRLReward
from vlmrm.errors import RewardError, RowError
from vlmrm.rewards import RewardSet

PROMPTS = [["aaa", "x", "a", "solo"], ["yyy", "aa", "zz", "bbbb"]]
GROUPS = [[7, 8, 7, "one"], [8, 7, 8, 9]]

state = PartialState(cpu=True)
rank = state.process_index
rewards = RewardSet(
    [
        {"name": "rank", "reward_model": "tests.rewards.reward_examples.Rank"},
        {"name": "threads", "reward_model": "tests.rewards.reward_examples.Rank", "async_reward": True},
        {"name": "length", "reward_model": "tests.rewards.reward_examples.Length", "batch_size": 3},
    ]
)
scored = rewards(prompt=PROMPTS[rank], groups=GROUPS[rank])
found = {name: values.tolist() for name, values in scored.rewards.items()}
found["advantages"] = scored.advantages("sum").tolist()
found["metrics"] = {name: value for name, value in scored.metrics().items() if "seconds" not in name}
try:
    RewardSet({"name": "judge", "reward_model": "tests.rewards.reward_examples.Down"})(prompt=[["up"], ["down"]][rank])
except RewardError as error:
    found["error"] = str(error)


class Given:
    """A scorer of known scores; None fails."""

    def __init__(self, *scores: float | None):
        self.scores = scores

    def score_each(self, conversations: list[object]) -> list[float | RowError]:
        return [RowError("it is broken") if score is None else score for score in self.scores]


# Of "a" one sample is on the other rank, of "b" none has a score, and the second rank has no failure.
ASKED = [["a", "a", "b"], ["a", "c", "c"]]
SCORES = [(-3.0, None, None), (-5.0, -1.0, -2.0)]
found["trl"] = TRLReward(Given(*SCORES[rank]))(ASKED[rank], ["x", "y", "z"])


class ORM(VlmrmORM):
    model = Given(*SCORES[rank])


messages = [[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}] for text in ASKED[rank]]
found["swift"] = ORM()(["x", "y", "z"], messages=messages)
everyone = gather_object([found])
rewards.close()
if state.is_main_process:
    sys.stdout.write(json.dumps(everyone) + "\n")
state.destroy_process_group()
