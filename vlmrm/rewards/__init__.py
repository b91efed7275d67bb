"""Rewards as reinforcement learning takes them: one contract, many at once, built-in ones, judges, remote ones."""

from vlmrm.rewards.advantages import advantages
from vlmrm.rewards.configuration import reward_arguments
from vlmrm.rewards.contract import (
    BaseRewardModel,
    GroupwiseRewardModel,
    PointwiseRewardModel,
    RewardArguments,
    RewardModelOutput,
)
from vlmrm.rewards.loading import Models
from vlmrm.rewards.outcome import Rewards
from vlmrm.rewards.registry import register_reward_model, reward_model_class
from vlmrm.rewards.reward_set import RewardSet

__all__ = [
    "PointwiseRewardModel",
    "GroupwiseRewardModel",
    "BaseRewardModel",
    "RewardModelOutput",
    "RewardArguments",
    "register_reward_model",
    "reward_model_class",
    "reward_arguments",
    "RewardSet",
    "Rewards",
    "Models",
    "advantages",
]
