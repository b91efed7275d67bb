"""TRL: a `reward_funcs` entry of GRPOTrainer and RLOOTrainer, synchronous or asynchronous.

    GRPOTrainer(..., reward_funcs=[TRLReward("outputs/best")])

TRL merges a row's images into its prompt, so they are taken from there; only where there are none, from the columns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlmrm.errors import RowError
from vlmrm.scoring.adapters.rows import SharedScorer
from vlmrm.scoring.protocol import Scorer

logger = logging.getLogger("vlmrm")


class TRLReward:
    """The raw logit of each completion, None where it cannot be scored: TRL then leaves the sample out.

    TRL logs `rewards/{name}/mean`. `model` is the folder of a checkpoint, the address of a service, or a `Scorer`;
    `options` are keywords of `vlmrm.load_scorer`.
    """

    def __init__(self, model: str | Path | Scorer, *, name: str = "vlmrm", **options: Any):
        self.scorer = SharedScorer(model, **options)
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        images = columns.get("images", columns.get("image"))
        scores = self.scorer.score_rows(prompts, completions, images, columns.get("videos"))
        failed = {place: score.reason for place, score in enumerate(scores) if isinstance(score, RowError)}
        for place, reason in failed.items():
            logger.warning("reward %s: sample %d has none: %s", self.__name__, place, reason)
        if log_metric is not None:
            log_metric(f"rm/{self.__name__}/unscored", len(failed) / max(len(scores), 1))
        return [None if isinstance(score, RowError) else score for score in scores]


class AsyncTRLReward(TRLReward):
    """The same on a thread: TRL computes it while it waits for its other asynchronous rewards."""

    async def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:  # ty: ignore[incompatible-method-override]
        return await asyncio.to_thread(super().__call__, *args, **kwargs)
