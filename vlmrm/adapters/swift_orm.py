"""ms-swift: outcome reward models, synchronous and asynchronous.

A plugin file names the checkpoint and registers the class (examples/swift_plugin.py):

    from swift.rewards import orms

    class People(VlmrmORM):
        model = "outputs/best"

    orms["people"] = People     # swift rlhf ... --external_plugins plugin.py --reward_funcs people

`orms.update(set_orms("rewards.yaml"))` registers each reward of a `RewardSet` by its name, for `--scale_rewards gdpo`
too, with the configuration's weights as `--reward_weights`.

The classes have the constructor and call of `swift.rewards.ORM` and `AsyncORM`; importing them needs no ms-swift.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vlmrm.adapters.rows import (
    Elsewhere,
    SharedScorer,
    SharedSet,
    checked_on_failure,
    numbers,
    prompt_key,
    scores_elsewhere,
    values_elsewhere,
    without_failures,
)
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.rewards import reward_arguments
from vlmrm.rewards.outcome import with_group_means, without_missing
from vlmrm.rewards.ranks import world_size


class VlmrmORM:
    """The raw logit of each completion; of a failed one the mean of its prompt's completions on all processes.

    ms-swift turns None into 0, which is a high reward among negative logits, so None is never returned. The prompt is
    the row's `messages` without the last, its media the row's `images` and `videos`.
    """

    model: ClassVar[Any] = None  # a checkpoint folder, the address of a service, or a `Scorer`
    on_failure: ClassVar[str] = "mean"  # or "raise": a completion that cannot be scored ends the run
    options: ClassVar[dict[str, Any]] = {}  # keywords of `vlmrm.load_scorer`
    here: int | None = None  # as of `scores_elsewhere`

    def __init__(self, args: Any = None, **kwargs: Any):
        if self.model is None:
            raise ConfigError(f"{type(self).__name__} names no checkpoint: derive a class from it with model = ...")
        self.args = args
        checked_on_failure(self.on_failure)
        self.scorer = SharedScorer(self.model, **self.options)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the reward of each completion."""
        prompts = [messages[:-1] for messages in columns["messages"]]
        media = [columns.get(name) or [None] * len(prompts) for name in ("images", "videos")]
        scores = self.scorer.score_rows(prompts, completions, *media)
        if world_size() == 1 and not any(isinstance(score, RowError) for score in scores):
            return [score for score in scores if not isinstance(score, RowError)]
        groups = _groups(prompts, columns)
        elsewhere = scores_elsewhere(type(self).__name__, groups, scores, self.here)
        without_failures(type(self).__name__, scores, groups, self.on_failure, elsewhere)  # says what failed
        level = _level(numbers(scores), groups, elsewhere)
        for index in np.flatnonzero(np.isnan(level)):
            where = f"reward {type(self).__name__}: sample {index}: {getattr(scores[index], 'reason', '')}"
            raise RewardError(f"{where}; no sample of the batch has a score")
        return level.tolist()


def _groups(prompts: Sequence[Any], columns: Mapping[str, Any]) -> list[Hashable]:
    """Return a key of each row's prompt: ms-swift's `prompt_id` of its text, or the turns; and the media."""
    ids = columns.get("prompt_id") or [""] * len(prompts)
    media = [columns.get(name) or [None] * len(prompts) for name in ("images", "videos")]
    return [
        (name or prompt_key(prompt), prompt_key(media_of_row))
        for name, prompt, *media_of_row in zip(ids, prompts, *media, strict=True)
    ]


def _level(own: np.ndarray, groups: list[Hashable], elsewhere: Elsewhere) -> np.ndarray:
    """Return `own` with NaN as its group's mean, else that of all processes' batch: equal rewards prefer nothing."""
    settled = with_group_means(own, groups, elsewhere)
    present = [*own[~np.isnan(own)].tolist(), *(value for _, value in elsewhere)]
    mean = float(np.mean(sorted(present))) if present else np.nan  # sorted: the same number on each process
    return np.where(np.isnan(settled), mean, settled)


class AsyncVlmrmORM(VlmrmORM):
    """The same on a thread: ms-swift computes it concurrently with other asynchronous rewards.

    It cannot ask other processes, as no order of the calls is given: a completion that cannot be scored ends the run
    where its group is not whole here.
    """

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args, **kwargs)
        # The larger size counts, since a call of evaluation looks like a part of a group of training.
        sizes = [getattr(args, name, None) for name in ("num_generations", "num_generations_eval")]
        self.here = max(filter(None, sizes), default=1)

    async def __call__(self, *args: Any, **columns: Any) -> list[float]:  # ty: ignore[incompatible-method-override]
        return await asyncio.to_thread(super().__call__, *args, **columns)


class OneOfSetORM:
    """One reward of a `RewardSet`; `set_orms` derives the classes.

    A masked reward is the mean of its group, and in a group without any that of the batch. One that no sample of the
    batch has is NaN, which ms-swift leaves out of its sums and logs.
    """

    name: ClassVar[str]
    of: ClassVar[_SharedSet]

    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the reward of each completion."""
        values = self.of.take(self.name, completions, lambda: self.of.rewards_of(completions, columns))
        return values.tolist()


class _SharedSet(SharedSet):
    def rewards_of(self, completions: Sequence[Any], columns: dict[str, Any]) -> dict[str, np.ndarray]:
        prompts = [messages[:-1] for messages in columns["messages"]]
        images = columns.get("images") or [None] * len(prompts)
        groups = _groups(prompts, columns)
        scored = self.rewards((prompts, completions, images), columns, groups)
        filled = without_missing(scored.rewards, groups)
        rewards = {name: _level(it, groups, values_elsewhere(groups, it)) for name, it in filled.items()}
        for index in np.flatnonzero(np.all([np.isnan(values) for values in rewards.values()], axis=0)):
            reasons = [f"reward {of}: {failures[index]}" for of, failures in scored.failures.items()]
            raise RewardError(f"sample {index} has no reward, nor has any of the batch: {reasons[0]}")
        return rewards


def set_orms(config: Any) -> dict[str, type[OneOfSetORM]]:
    """Return a class for ms-swift's `orms` of each reward of a configuration; a round computes all of them once."""
    shared = _SharedSet(config)
    names = [arguments.name for arguments in reward_arguments(config)]
    return {name: type(f"ORM_{name}", (OneOfSetORM,), {"name": name, "of": shared}) for name in names}
