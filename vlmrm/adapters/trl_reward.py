"""TRL: `reward_funcs` entries of GRPOTrainer and RLOOTrainer.

    GRPOTrainer(..., reward_funcs=[TRLReward("outputs/best")])
    GRPOTrainer(..., reward_funcs=[TRLRewardSet("rewards.yaml", num_generations=8)])
    GRPOTrainer(..., reward_funcs=rewards.each())  # GDPO, with reward_weights=rewards.weights() in the GRPOConfig

TRL merges a row's images into its prompt, so they are taken from there; only where it has none, from the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.adapters.rows import Column, SharedSet, prompt_keys, trained_model
from vlmrm.conversation import text_of
from vlmrm.errors import RewardError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards import reward_arguments
from vlmrm.rewards.outcome import weighted_total, without_missing
from vlmrm.rewards.ranks import rank
from vlmrm.scoring.protocol import Scorer

Log = Callable[[str, float], None] | None


class TRLRewardSet:
    """The weighted sum of all rewards of a `RewardSet`, judges and built-in ones included.

    A masked reward counts as the mean of its group, as in `RewardSet.advantages`, so that it neither pays nor punishes
    beside others. In a group without any reward all are None, and TRL leaves them out. TRL logs the sum as
    `rewards/{name}/mean`, each reward as `rm/{reward}/mean`.

    `each()` and `weights()` are the rewards one by one, for TRL's GDPO (`multi_objective_aggregation`).

    Args:
        config: anything that `RewardSet` takes.
        num_generations: samples of a group: consecutive ones, counted over all ranks; default: those of one prompt.
    """

    def __init__(self, config: Any, num_generations: int | None = None, *, name: str = "vlmrm"):
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
        images, videos = columns.get("images", columns.get("image")), columns.get("videos")
        size = self.num_generations
        groups = prompt_keys(prompts, images, videos) if size is None else _blocks(prompts, size)
        scored = self.shared.rewards((prompts, completions, images, videos), columns, groups)
        for name, value in scored.metrics().items():
            if log_metric is not None:
                log_metric(f"rm/{name.removeprefix('rewards/')}", value)
        return without_missing(scored.rewards, groups)


def _blocks(prompts: Column, size: int) -> list[int]:
    """Return the number of each sample's block of `size`, counted over all ranks; each is of one prompt."""
    first = rank() * len(prompts)
    groups = [(first + index) // size for index in range(len(prompts))]
    texts = [text_of(read_messages(prompt, "user")) for prompt in prompts]
    if len(set(zip(groups, texts, strict=True))) > len(set(groups)):
        raise RewardError(f"blocks of {size} samples differ in prompt: give TRL's num_generations.")
    return groups


class TRLReward(TRLRewardSet):
    """The raw logit of each completion, by a trained model: a `TRLRewardSet` of one.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        on_failure: `mask`, or `raise`: a completion that cannot be scored ends the run.
        options: of any reward, as `length_penalty`, and of `vlm_reward`, as `patience` or `max_tokens_per_batch`.
    """

    def __init__(self, model: str | Path | Scorer, *, name: str = "vlmrm", on_failure: str = "mask", **options: Any):
        super().__init__(trained_model(model, name, on_failure, **options), name=name)


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
