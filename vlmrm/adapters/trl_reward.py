"""TRL: `reward_funcs` entries of GRPOTrainer and RLOOTrainer, synchronous or asynchronous.

    GRPOTrainer(..., reward_funcs=[TRLReward("outputs/best")])
    GRPOTrainer(..., reward_funcs=[TRLRewardSet("rewards.yaml", num_generations=8)])
    GRPOTrainer(..., reward_funcs=rewards.each())  # GDPO, with reward_weights=rewards.weights() in the GRPOConfig

TRL merges a row's images into its prompt, so they are taken from there; only where it has none, from the columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.adapters.rows import (
    Column,
    SharedScorer,
    SharedSet,
    checked_on_failure,
    prompt_key,
    scores_elsewhere,
    without_failures,
)
from vlmrm.conversation import text_of
from vlmrm.errors import RewardError, RowError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards import reward_arguments
from vlmrm.rewards.outcome import weighted_total, without_missing
from vlmrm.rewards.ranks import rank, world_size
from vlmrm.scoring.protocol import Scorer

Log = Callable[[str, float], None] | None


class TRLReward:
    """The raw logit of each completion; of a failed one the mean of its prompt's completions on all processes.

    Where no completion of a prompt has a score, they are None and TRL leaves the samples out. It logs them as
    `rewards/{name}/mean`.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        on_failure: `mean`, or `raise`: a completion that cannot be scored ends the run.
        options: keywords of `vlmrm.load_scorer`.
    """

    here: int | None = None  # as of `scores_elsewhere`

    def __init__(self, model: str | Path | Scorer, *, name: str = "vlmrm", on_failure: str = "mean", **options: Any):
        self.scorer = SharedScorer(model, **options)
        self.on_failure = checked_on_failure(on_failure)
        self.__name__ = name

    def __call__(
        self, prompts: Column, completions: Column, *, log_metric: Log = None, **columns: Any
    ) -> list[float | None]:
        images, videos = columns.get("images", columns.get("image")), columns.get("videos")
        scores = self.scorer.score_rows(prompts, completions, images, videos)
        failed = sum(isinstance(score, RowError) for score in scores)
        if log_metric is not None:
            log_metric(f"rm/{self.__name__}/unscored", failed / max(len(scores), 1))
        if not failed and world_size() == 1:
            return [score for score in scores if not isinstance(score, RowError)]
        prompt_columns = [prompts, *(column for column in (images, videos) if column is not None)]
        groups = [prompt_key(row) for row in zip(*prompt_columns, strict=True)]
        elsewhere = scores_elsewhere(self.__name__, groups, scores, self.here)
        return without_failures(self.__name__, scores, groups, self.on_failure, elsewhere)


class AsyncTRLReward(TRLReward):
    """The same on a thread: TRL computes it concurrently with other asynchronous rewards.

    It cannot ask other processes, as no order of the calls is given. A completion that cannot be scored takes the mean
    of its prompt's completions here, if these are `num_generations`, TRL's own; otherwise the run ends.
    """

    def __init__(self, *args: Any, num_generations: int | None = None, **options: Any):
        super().__init__(*args, **options)
        self.here = num_generations or 0

    async def __call__(self, *args: Any, **kwargs: Any) -> list[float | None]:  # ty: ignore[incompatible-method-override]
        return await asyncio.to_thread(super().__call__, *args, **kwargs)


class TRLRewardSet:
    """The weighted sum of all rewards of a `RewardSet`, judges and built-in ones included.

    A masked reward counts as the mean of its group, as in `RewardSet.advantages`; a sample without any is None, and
    TRL leaves it out. TRL logs the sum as `rewards/{name}/mean`, each reward as `rm/{reward}/mean`.

    `each()` and `weights()` are the rewards one by one, for TRL's GDPO (`multi_objective_aggregation`).

    Args:
        config: anything that `RewardSet` takes.
        num_generations: samples of a group: consecutive ones, counted over all ranks.
    """

    def __init__(self, config: Any, num_generations: int, *, name: str = "vlmrm"):
        self.shared, self.num_generations, self.__name__ = SharedSet(config), num_generations, name

    def each(self) -> list[OneOfSet]:
        """Return a reward function of each reward, by its name; the first that TRL calls in a round computes all."""
        return [OneOfSet(self, arguments.name) for arguments in reward_arguments(self.shared.config)]

    def weights(self) -> list[float]:
        """Return the weights of `each`, for TRL's `reward_weights`."""
        return [arguments.weight for arguments in reward_arguments(self.shared.config)]

    def __call__(
        self, prompts: Column, completions: Column, *, log_metric: Log = None, **columns: Any
    ) -> list[float | None]:
        filled = self.filled(prompts, completions, columns, log_metric)
        weights = dict(zip(filled, self.weights(), strict=True))
        present = {name: values for name, values in filled.items() if not np.isnan(values).all()}
        return _or_none(weighted_total(present, weights, len(prompts)), filled)

    def filled(
        self, prompts: Column, completions: Column, columns: Mapping[str, Any], log_metric: Log
    ) -> dict[str, np.ndarray]:
        """Return the rewards by name, [N], as `without_missing` does."""
        first = rank() * len(prompts)
        groups = [(first + index) // self.num_generations for index in range(len(prompts))]
        texts = [text_of(read_messages(prompt, "user")) for prompt in prompts]
        if len(set(zip(groups, texts, strict=True))) > len(set(groups)):
            raise RewardError(
                f"blocks of {self.num_generations} samples differ in prompt: give TRL's num_generations."
            )
        images = columns.get("images", columns.get("image"))
        scored = self.shared.rewards((prompts, completions, images), columns, groups)
        for name, value in scored.metrics().items():
            if log_metric is not None:
                log_metric(f"rm/{name.removeprefix('rewards/')}", value)
        return without_missing(scored.rewards, groups)


class OneOfSet:
    """One reward of a `TRLRewardSet`, as a reward function of TRL."""

    def __init__(self, of: TRLRewardSet, name: str):
        self.of, self.__name__ = of, name

    def __call__(
        self, prompts: Column, completions: Column, *, log_metric: Log = None, **columns: Any
    ) -> list[float | None]:
        values = self.of.shared.take(
            self.__name__, completions, lambda: self.of.filled(prompts, completions, columns, log_metric)
        )
        return _or_none(values, {self.__name__: values})


def _or_none(totals: np.ndarray, rewards: Mapping[str, np.ndarray]) -> list[float | None]:
    """Return the numbers, None in samples without any reward."""
    missing = np.all([np.isnan(values) for values in rewards.values()], axis=0)
    return [None if gone else float(total) for gone, total in zip(missing, totals, strict=True)]
