"""TRL: a `reward_funcs` entry of GRPOTrainer and RLOOTrainer, synchronous or asynchronous.

    GRPOTrainer(..., reward_funcs=[TRLReward("outputs/best")])

TRL merges a row's images into its prompt, so they are taken from there; only where there are none, from the columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from vlmrm.errors import RewardError, RowError
from vlmrm.scoring.adapters.rows import SharedScorer
from vlmrm.scoring.missing import checked_on_failure, prompt_key, without_failures
from vlmrm.scoring.protocol import Scorer


class TRLReward:
    """The raw logit of each completion; of one that cannot be scored the mean of those of its prompt in the call.

    Where a prompt has no score at all it is None, and TRL leaves the samples out. A None beside other scores would
    become a 0 as soon as there is a second reward function: where the rest of a group may be on another process, the
    run ends instead. On several processes `num_generations`, TRL's own, tells a whole group.

    TRL logs `rewards/{name}/mean`. `model` is the folder of a checkpoint, the address of a service, or a `Scorer`;
    with `on_failure="raise"` a completion that cannot be scored ends the run; `options` are keywords of
    `vlmrm.load_scorer`.
    """

    def __init__(
        self,
        model: str | Path | Scorer,
        *,
        name: str = "vlmrm",
        on_failure: str = "mean",
        num_generations: int | None = None,
        **options: Any,
    ):
        self.scorer = SharedScorer(model, **options)
        self.on_failure = checked_on_failure(on_failure)
        self.num_generations = num_generations
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        images, videos = columns.get("images", columns.get("image")), columns.get("videos")
        scores = self.scorer.score_rows(prompts, completions, images, videos)
        failed = sum(isinstance(score, RowError) for score in scores)
        if log_metric is not None:
            log_metric(f"rm/{self.__name__}/unscored", failed / max(len(scores), 1))
        if not failed:
            return [score for score in scores if not isinstance(score, RowError)]
        asked = [prompts, *(column for column in (images, videos) if column is not None)]
        groups = [prompt_key(row) for row in zip(*asked, strict=True)]
        settled = without_failures(self.__name__, scores, groups, self.on_failure)
        self._refuse_parts(scores, settled, groups)
        return settled

    def _refuse_parts(
        self, scores: Sequence[float | RowError], settled: Sequence[float | None], groups: Sequence[Hashable]
    ) -> None:
        """Refuse a group without any score of which another process may have the rest.

        Raises:
            RewardError: naming its first sample.
        """
        if None not in settled or _processes() == 1:
            return
        for place, score in enumerate(scores):
            if settled[place] is not None or not isinstance(score, RowError):
                continue
            here = groups.count(groups[place])
            if self.num_generations is None or here % self.num_generations:
                raise RewardError(
                    f"reward {self.__name__}: sample {place}: {score.reason}; nor has any of its prompt here, and "
                    "another process may have more of it: give each process whole groups and say num_generations, "
                    "or use TRLRewardSet"
                )


def _processes() -> int:
    from torch import distributed  # not before a call: whoever imports an adapter may have no use for torch

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class AsyncTRLReward(TRLReward):
    """The same on a thread: TRL computes it while it waits for its other asynchronous rewards."""

    async def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:  # ty: ignore[incompatible-method-override]
        return await asyncio.to_thread(super().__call__, *args, **kwargs)
