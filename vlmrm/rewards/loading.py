"""Reward models, each loaded once whatever the names it is under."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from accelerate import Accelerator, PartialState

from vlmrm.rewards.configuration import identity
from vlmrm.rewards.contract import BaseRewardModel, GroupwiseRewardModel, RewardArguments
from vlmrm.rewards.registry import reward_model_class
from vlmrm.rewards.threads import Threads


@dataclass(frozen=True)
class Reward:
    """One name of a configuration, with the model that it shares with others of the same identity.

    `slots` bounds the calls of the shared model at a time; `threads` are those of an asynchronous reward.
    """

    arguments: RewardArguments
    model: BaseRewardModel
    slots: threading.Semaphore
    threads: Threads | None

    @property
    def groupwise(self) -> bool:
        return isinstance(self.model, GroupwiseRewardModel)


class Models:
    """The models that are loaded, by what decides their results. Give one to two reward sets and they share them."""

    def __init__(self, accelerator: Accelerator | PartialState | None = None):
        self.accelerator = accelerator or PartialState()
        self._loaded: dict[str, tuple[BaseRewardModel, threading.Semaphore]] = {}

    def __len__(self) -> int:
        return len(self._loaded)

    def reward(self, arguments: RewardArguments) -> Reward:
        """The reward of one name; its model is loaded unless an equal one is."""
        key = identity(arguments)
        if key not in self._loaded:
            model = reward_model_class(str(arguments.reward_model))(arguments, self.accelerator)
            # A model that waits for a network may be called again meanwhile; any other is not made for two threads.
            self._loaded[key] = model, threading.Semaphore(arguments.num_workers if arguments.async_reward else 1)
        model, slots = self._loaded[key]
        threads = Threads(arguments.num_workers, f"reward-{arguments.name}") if arguments.async_reward else None
        if model.config is not arguments:
            model = model.with_config(arguments)
        return Reward(arguments, model, slots, threads)
