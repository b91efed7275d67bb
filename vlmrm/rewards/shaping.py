"""What a configuration does to a reward's number: the range it must be in, penalties, clipping, in this order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlmrm.conversation import text_of
from vlmrm.errors import RowError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards.contract import RewardArguments


def shaped(arguments: RewardArguments, reward: float, details: Mapping[str, Any], response: Any) -> float:
    """Return a sample's reward as the run gets it.

    Args:
        details: the model's, of which `uncertainty_penalty` reads `std`, or `log_sigma`, its logarithm.
        response: the answer, of which `length_penalty` counts the words.

    Raises:
        RowError: when the reward is outside `valid`, or lacks what a penalty reads.
    """
    if arguments.valid is not None and not arguments.valid[0] <= reward <= arguments.valid[1]:
        low, high = arguments.valid
        raise RowError(f"its reward {reward:.6g} is outside valid, {low:g} to {high:g}")
    if arguments.uncertainty_penalty:
        reward -= arguments.uncertainty_penalty * _deviation(details)
    if arguments.length_penalty:
        if response is None:
            raise RowError("it has no response, whose words length_penalty counts: leave length_penalty out")
        text = response if isinstance(response, str) else text_of(read_messages(response, "assistant"))
        reward -= arguments.length_penalty * max(len(text.split()) - arguments.length_free, 0)
    if arguments.clip is not None:
        reward = min(max(reward, arguments.clip[0]), arguments.clip[1])
    return reward


def _deviation(details: Mapping[str, Any]) -> float:
    if details.get("std") is not None:
        return float(details["std"])
    if details.get("log_sigma") is not None:
        return math.exp(details["log_sigma"])
    raise RowError("its reward tells no std or log_sigma, which uncertainty_penalty takes: leave it out")
