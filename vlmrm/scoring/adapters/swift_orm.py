"""ms-swift: outcome reward models, synchronous and asynchronous.

A plugin file names the checkpoint and registers the class (examples/swift_plugin.py):

    from swift.rewards import orms

    class People(VlmrmORM):
        model = "outputs/best"

    orms["people"] = People     # swift rlhf ... --external_plugins plugin.py --reward_funcs people

They have the constructor and call of `swift.rewards.ORM` and `AsyncORM`, which is all that ms-swift asks of them, and
so need no ms-swift to be imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from vlmrm.errors import ConfigError
from vlmrm.scoring.adapters.trl_reward import TRLReward


class VlmrmORM:
    """The raw logit of each completion, None where it cannot be scored: ms-swift then leaves the sample out.

    The prompt is the row's `messages` but for the last, its media the row's `images` and `videos`.
    """

    model: ClassVar[Any] = None  # the folder of a checkpoint, the address of a service, or a `Scorer`
    options: ClassVar[dict[str, Any]] = {}  # keywords of `vlmrm.load_scorer`

    def __init__(self, args: Any = None, **kwargs: Any):
        if self.model is None:
            raise ConfigError(f"{type(self).__name__} names no checkpoint: derive a class from it with model = ...")
        self.args = args
        self.reward = TRLReward(self.model, name=type(self).__name__, **self.options)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        prompts = [messages[:-1] for messages in columns["messages"]]
        return self.reward(prompts, completions, images=columns.get("images"), videos=columns.get("videos"))


class AsyncVlmrmORM(VlmrmORM):
    """The same on a thread: ms-swift computes it beside other asynchronous rewards."""

    async def __call__(  # ty: ignore[incompatible-method-override]
        self, completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        return await asyncio.to_thread(super().__call__, completions, **columns)
