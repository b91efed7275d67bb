"""verl: a custom reward function.

    reward.custom_reward_function.path=pkg://vlmrm.scoring.adapters.verl_reward
    +reward.custom_reward_function.reward_kwargs.model=outputs/best

verl shows such a function neither the prompt nor its images, so the data's column `extra_info` holds them: `prompt`, a
text or messages, and `images` or `videos` for its places. `verl_manager` sees them itself. verl asks for one
sample at a time; samples that are asked for at the same time are scored together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vlmrm.errors import RewardError, RowError
from vlmrm.scoring.adapters.rows import SharedScorer, conversation


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    model: Any,
    load: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """`{"score": the raw logit}` of one answer.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        load: keywords of `vlmrm.load_scorer`.

    Raises:
        RewardError: when the answer cannot be scored: verl has no word for a sample without a reward.
    """
    row = extra_info or {}
    if row.get("prompt") is None:
        raise RewardError("extra_info has no prompt: add it and its images to the data, or use VlmrmRewardManager.")
    scorer = SharedScorer(model, **(load or {}))
    return {"score": await score_one(scorer, row["prompt"], solution_str, row.get("images"), row.get("videos"))}


async def score_one(scorer: SharedScorer, *row: Any) -> float:
    """The raw logit of a `conversation`, scored with those that other tasks ask for at the same time."""
    try:
        return await asyncio.wrap_future(scorer.micro_batcher.submit(conversation(*row)))
    except RowError as error:
        raise RewardError(f"an answer cannot be scored: {error.reason}") from error
