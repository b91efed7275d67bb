"""TRL: all rewards of a `RewardSet`, judges and built-in ones too, as one `reward_funcs` entry.

GRPOTrainer(..., reward_funcs=[TRLRewardSet("rewards.yaml", num_generations=8)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from accelerate import PartialState

from vlmrm.conversation import text_of
from vlmrm.errors import RewardError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards import RewardSet
from vlmrm.rewards.advantages import without_missing
from vlmrm.scoring.adapters.samples import text_columns

NO_COLUMNS = ("completion_ids", "trainer_state", "log_extra", "environments", "images")


class TRLRewardSet:
    """The weighted sum of the rewards. A masked one counts as the mean of its group, as in `RewardSet.advantages`; a
    sample without any is None, and TRL leaves it out. TRL logs the sum as `rewards/{name}/mean`, each reward as
    `rm/{reward}/mean`.

    `config` is what `RewardSet` takes. A group is a block of `num_generations` samples, counted over all ranks.
    """

    def __init__(self, config: Any, num_generations: int, *, name: str = "vlmrm"):
        self.config, self.num_generations, self.__name__ = config, num_generations, name
        self.rewards: RewardSet | None = None  # made where it is used: models and threads are not pickled

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rewards": None}

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        self.rewards = self.rewards or RewardSet(self.config)
        ours = text_columns(prompts, completions, columns.get("images", columns.get("image")))
        first = PartialState().process_index * len(prompts)
        ours["groups"] = [(first + place) // self.num_generations for place in range(len(prompts))]
        texts = [text_of(read_messages(prompt, "user")) for prompt in prompts]
        if len(set(zip(ours["groups"], texts, strict=True))) > len(set(ours["groups"])):
            raise RewardError(
                f"blocks of {self.num_generations} samples differ in prompt: give TRL's num_generations."
            )
        theirs = {name: column for name, column in columns.items() if name not in NO_COLUMNS}
        scored = self.rewards(**{**theirs, **ours})
        for name, value in scored.metrics().items():
            if log_metric is not None:
                log_metric(f"rm/{name.removeprefix('rewards/')}", value)
        taken = without_missing(scored.rewards, ours["groups"])
        totals = np.sum([scored.weights[name] * values for name, values in taken.items()], axis=0)
        return [None if np.isnan(total) else float(total) for total in totals]
