"""Many rewards of the same samples: loaded once each, computed in batches and groups, checked, and put together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState

from vlmrm.rewards.audit import AuditLog
from vlmrm.rewards.configuration import Config, reward_arguments
from vlmrm.rewards.loading import Models
from vlmrm.rewards.outcome import Rewards
from vlmrm.rewards.pending import Pending


class RewardSet:
    """The rewards of a configuration.

        rewards = RewardSet("rewards.yaml")
        scored = rewards(prompt=prompts, image=images, groups=prompt_ids)
        scored.rewards["aesthetic"], scored.advantages("gdpo")

    Args:
        config: a YAML file, or what `vlmrm.rewards.configuration.reward_arguments` takes.
        block: `rewards` or `eval_rewards`.
        accelerator: what reward models get as theirs; default: accelerate's state of this process.
        models: give one to two sets, as of the two blocks, and they share their models.
        audit_log: a JSONL file that every reward is appended to, with what its model said.

    Raises:
        ConfigError: for a configuration that cannot work.
    """

    def __init__(
        self,
        config: Config,
        *,
        block: str = "rewards",
        accelerator: Accelerator | PartialState | None = None,
        models: Models | None = None,
        audit_log: str | Path | None = None,
    ):
        self.models = Models(accelerator) if models is None else models
        self.rewards = [self.models.reward(arguments) for arguments in reward_arguments(config, block)]
        self.audit = None if audit_log is None else AuditLog(audit_log)

    def __call__(
        self, *, prompt: Sequence[Any], groups: Sequence[Hashable] | None = None, **columns: Sequence[Any] | None
    ) -> Rewards:
        """All rewards of N samples; columns are lists of N, see `Samples`. A collective call: every rank makes it.

        Raises:
            RewardError: naming the reward and the sample, when one fails and its policy is `raise`.
        """
        pending = self.start()
        pending.add(prompt=prompt, groups=groups, **columns)
        return pending.finish()

    def start(self, group_size: int | None = None) -> Pending:
        """Samples that come bit by bit: asynchronous rewards are computed meanwhile.

        Args:
            group_size: how many samples a group has, so that a groupwise one need not wait for the last.
        """
        return Pending(self.rewards, self.audit, group_size)

    def close(self) -> None:
        """Cancels what the threads of asynchronous rewards have not begun."""
        for reward in self.rewards:
            if reward.threads is not None:
                reward.threads.cancel()
