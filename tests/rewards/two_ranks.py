"""Run by test_ranks under torchrun: groups that lie across the ranks, and a judge that fails on one of them.

Prints one line of JSON a rank: rewards, advantages, metrics, and the error of the failing round.
"""

from __future__ import annotations

import json
import sys

from accelerate import PartialState
from accelerate.utils import gather_object

from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet

PROMPTS = [["aaa", "x", "a", "solo"], ["yyy", "aa", "zz", "bbbb"]]
GROUPS = [[7, 8, 7, "one"], [8, 7, 8, 9]]

state = PartialState(cpu=True)
rank = state.process_index
rewards = RewardSet(
    [
        {"name": "rank", "reward_model": "reward_examples.Rank"},
        {"name": "threads", "reward_model": "reward_examples.Rank", "async_reward": True},
        {"name": "length", "reward_model": "reward_examples.Length", "batch_size": 3},
    ]
)
scored = rewards(prompt=PROMPTS[rank], groups=GROUPS[rank])
found = {name: values.tolist() for name, values in scored.rewards.items()}
found["advantages"] = scored.advantages("sum").tolist()
found["metrics"] = {name: value for name, value in scored.metrics().items() if "seconds" not in name}
try:
    RewardSet({"name": "judge", "reward_model": "reward_examples.Down"})(prompt=[["up"], ["down"]][rank])
except RewardError as error:
    found["error"] = str(error)
everyone = gather_object([found])
rewards.close()
if state.is_main_process:
    sys.stdout.write(json.dumps(everyone) + "\n")
state.destroy_process_group()
