"""OpenRLHF: a reward function in a file.

    VLMRM_REWARD_MODEL=http://host:8080 ... --reward.remote_url vlmrm/adapters/openrlhf_reward.py

OpenRLHF passes a function the rendered prompt and no images, so the label of a row (`--data.label_key`) must hold
both: `{"prompt": a text or messages, "images": [paths]}`, or that as JSON. Without a prompt in it the rendered one is
parsed; it must be ChatML. OpenRLHF scores one sample on each of many threads; concurrent samples are scored together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrm.adapters.rows import SharedScorer
from vlmrm.errors import ConfigError, RowError, first_line
from vlmrm.formats.rollouts import PADS, read_openrlhf_query, zip_columns
from vlmrm.scoring.protocol import Scorer

logger = logging.getLogger("vlmrm")


class Unscored(BaseException):
    """Ends OpenRLHF's run where a sample has no reward, as it passes one at a time and there is no group's mean.

    It is no `Exception`: OpenRLHF 0.11 logs those at level INFO, and fails later on a model that nobody configured.
    """


class OpenRLHFReward:
    """Reward samples: `rewards` are raw logits, and `scores`, for dynamic filtering, are σ of them.

    `model` and `options` are those of `SharedScorer`; messages call the reward `name`.
    """

    def __init__(self, model: str | Path | Scorer, *, name: str = "vlmrm", **options: Any):
        self.name = name
        self.scorer = SharedScorer(model, **options)

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any
    ) -> dict[str, Any]:
        """Return the rewards of N samples, as tensors [N]."""
        import torch

        scores = []
        try:
            rows = zip_columns(prompts, queries, labels)
            waiting = [self.scorer.micro_batcher.submit(read_openrlhf_query(*row)) for row in rows]
            scores = [future.result() for future in waiting]
        except Exception as error:
            raise _unscored(self.name, error, prompts, queries) from error
        raw = torch.tensor(scores)
        return {"rewards": raw, "scores": raw.sigmoid(), "extra_logs": {"raw_score": raw}}


def _unscored(name: str, error: Exception, prompts: Sequence[str], queries: Sequence[str]) -> Unscored:
    reason = error.reason if isinstance(error, RowError) else first_line(error)
    sample = ""
    if len(prompts) == len(queries) == 1:
        # OpenRLHF decodes the query, with a placeholder for each token of an image where the prompt has one.
        prompt, query = PADS.sub(r"\1", prompts[0] or ""), PADS.sub(r"\1", queries[0])
        answer = query.removeprefix(prompt)
        sample = f" the answer {answer!r:.80} to {prompt!r:.80}:"
    message = f"reward {name}:{sample} {reason}"
    logger.error(message)  # Ray prints the exception below many lines of its own
    return Unscored(message)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any) -> dict[str, Any]:
    """Score samples by the model that VLMRM_REWARD_MODEL names; OpenRLHF calls the function of this name."""
    if "VLMRM_REWARD_MODEL" not in os.environ:
        error = ConfigError("VLMRM_REWARD_MODEL is not set: set it to the folder of a checkpoint before ray starts.")
        raise _unscored("vlmrm", error, (), ())
    return OpenRLHFReward(os.environ["VLMRM_REWARD_MODEL"])(queries, prompts, labels)
