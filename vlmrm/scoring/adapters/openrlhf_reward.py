"""OpenRLHF: a reward function in a file.

    VLMRM_REWARD_MODEL=outputs/best ... --reward.remote_url vlmrm/scoring/adapters/openrlhf_reward.py

OpenRLHF gives a function the rendered prompt and no images, so the label of a row (`--data.label_key`) holds them:
`{"prompt": a text or messages, "images": [paths]}`, or that as JSON. Without a prompt in it the rendered one is read,
which must be ChatML. It asks for one sample on each of many threads; those that are asked for at the same time are
scored together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.scoring.adapters.openrlhf_query import query_conversation
from vlmrm.scoring.adapters.rows import SharedScorer, table


class OpenRLHFReward:
    """`rewards` are raw logits; `scores`, for dynamic filtering, are σ of them. Arguments as of `SharedScorer`."""

    def __init__(self, model: Any, **options: Any):
        self.scorer = SharedScorer(model, **options)

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any
    ) -> dict[str, Any]:
        """Raises RewardError when a sample cannot be scored; OpenRLHF logs that and goes on without its reward."""
        import torch

        try:
            rows = [query_conversation(*row) for row in table(prompts, queries, labels)]
            waiting = [self.scorer.micro_batcher.submit(row) for row in rows]
            raw = torch.tensor([each.result() for each in waiting])
        except RowError as error:
            raise RewardError(f"an answer cannot be scored: {error.reason}") from error
        return {"rewards": raw, "scores": raw.sigmoid(), "extra_logs": {"raw_score": raw}}


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any) -> dict[str, Any]:
    if "VLMRM_REWARD_MODEL" not in os.environ:
        raise ConfigError("VLMRM_REWARD_MODEL is not set: set it to the folder of a checkpoint before ray starts.")
    return OpenRLHFReward(os.environ["VLMRM_REWARD_MODEL"])(queries, prompts, labels)
