"""ms-swift: outcome reward models.

A plugin file names the checkpoint and registers the class (examples/swift_plugin.py):

    from swift.rewards import orms

    class People(VlmrmORM):
        model = "outputs/best"

    orms["people"] = People     # swift rlhf ... --external_plugins plugin.py --reward_funcs people

`orms.update(set_orms("rewards.yaml"))` registers each reward of a `RewardSet` by its name, for `--scale_rewards gdpo`
too, with the configuration's weights as `--reward_weights`.

The classes have the constructor and call of `swift.rewards.ORM`; importing them needs no ms-swift.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vlmrm.adapters.rows import SharedSet, prompt_key, trained_model
from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards import reward_arguments
from vlmrm.rewards.outcome import without_missing


class OneOfSetORM:
    """One reward of a `RewardSet`; `set_orms` derives the classes.

    ms-swift turns None into 0, which is a high reward among negative logits. So a masked reward is the mean of its
    group on all processes, and in a group without any that of the batch. One that no sample of the batch has is NaN,
    which ms-swift leaves out of its sums and logs. The prompt is the row's `messages` without the last, its media the
    row's `images` and `videos`.
    """

    name: ClassVar[str]
    of: _SharedSet

    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the reward of each completion."""
        values = self.of.take(self.name, completions, lambda: self.of.rewards_of(completions, columns))
        return values.tolist()


class VlmrmORM(OneOfSetORM):
    """The raw logit of each completion by a trained model."""

    model: ClassVar[Any] = None  # a checkpoint folder, the address of a service, or a `Scorer`
    on_failure: ClassVar[str] = "mask"  # or "raise": a completion that cannot be scored ends the run
    options: ClassVar[dict[str, Any]] = {}  # of any reward, and of `vlm_reward`

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args)
        if self.model is None:
            raise ConfigError(f"{type(self).__name__} names no checkpoint: derive a class from it with model = ...")
        self.name = type(self).__name__  # ty: ignore[invalid-attribute-access]
        self.of = _SharedSet(trained_model(self.model, self.name, self.on_failure, **self.options))


def _groups(prompts: Sequence[Any], columns: Mapping[str, Any]) -> list[Hashable]:
    """Return a key of each row's prompt: ms-swift's `prompt_id` of its text, or the turns; and the media."""
    ids = columns.get("prompt_id") or [""] * len(prompts)
    media = [columns.get(name) or [None] * len(prompts) for name in ("images", "videos")]
    return [
        (name or prompt_key(prompt), prompt_key(media_of_row))
        for name, prompt, *media_of_row in zip(ids, prompts, *media, strict=True)
    ]


class _SharedSet(SharedSet):
    def rewards_of(self, completions: Sequence[Any], columns: dict[str, Any]) -> dict[str, np.ndarray]:
        prompts = [messages[:-1] for messages in columns["messages"]]
        images, videos = (columns.get(name) or [None] * len(prompts) for name in ("images", "videos"))
        groups = _groups(prompts, columns)
        scored = self.rewards((prompts, completions, images, videos), columns, groups)
        rewards = without_missing(scored.rewards, groups, everywhere=True)  # equal rewards prefer nothing
        for index in np.flatnonzero(np.all([np.isnan(values) for values in rewards.values()], axis=0)):
            reasons = [f"reward {of}: {failures[index]}" for of, failures in scored.failures.items()]
            raise RewardError(f"sample {index} has no reward, nor has any of the batch: {reasons[0]}")
        return rewards


def set_orms(config: Any) -> dict[str, type[OneOfSetORM]]:
    """Return a class for ms-swift's `orms` of each reward of a configuration; a round computes all of them once."""
    shared = _SharedSet(config)
    names = [arguments.name for arguments in reward_arguments(config)]
    return {name: type(f"ORM_{name}", (OneOfSetORM,), {"name": name, "of": shared}) for name in names}
