"""A scorer and a reward that fail for the second sample of each call, as one whose picture is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from vlmrm.errors import RowError
from vlmrm.rewards import RewardModelOutput
from vlmrm.rewards.built_in.vlm_reward import VlmReward
from vlmrm.scoring import load_scorer


class BreaksOne:
    """A scorer that asks a service."""

    def __init__(self, url: str):
        self.scorer = load_scorer(url)

    def score_each(self, conversations: Sequence[Any]) -> list[float | RowError]:
        scores = self.scorer.score_each(conversations)
        scores[1] = RowError("the picture is broken")
        return scores


def but_one(call: Callable[..., RewardModelOutput]) -> Callable[..., RewardModelOutput]:
    @wraps(call)
    def broken(self: VlmReward, **columns: Any) -> RewardModelOutput:
        output = call(self, **columns)
        return replace(output, rewards=[output.rewards[0], math.nan, *output.rewards[2:]])

    return broken


class VlmRewardButOne(VlmReward):
    """A reward whose model is in this process."""

    __call__ = but_one(VlmReward.__call__)
