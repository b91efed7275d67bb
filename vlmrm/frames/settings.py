"""The `reward:` block that collection and policy training share, and the settings of a collection.

What a block leaves out of `reward_model` is read from the checkpoint; what it says must be the checkpoint's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from vlmrm.frames.choices import IMAGE_KEY, IMAGE_SIZE
from vlmrm.settings import Strict

Count = int | None
Size = tuple[int, int, int]


class RewardModelSettings(Strict):
    """`reward_model`: the classifier, as a policy's training uses it, and what becomes of its probabilities.

    What says how the classifier is made must be as it was trained; of `use_pretrain` the checkpoint's is taken, with a
    warning. The encoder's weights are the checkpoint's too, whatever `pretrained_encoder_path` names.

    Attributes:
        reward_type: `binary`: 1 where the probability is above the checkpoint's threshold; `continuous`: the
            probability.
        reward_mode: `per_step`: of every step; `terminal`: of an episode's last step, and 0 before.
        reward_weight, env_reward_weight: factors of the learned and of the environment's own reward in their sum.
        smoothing: the probability is the mean over the last so many frames of the episode.
        hold: a binary reward needs so many successes after one another, the last of them now.
        accept_unqualified: take a classifier whose held-out figures do not show that it knows successes.
        device: where the classifier runs; default is the GPU where there is one.
    """

    checkpoint_path: Path | None = None
    image_keys: list[str] | None = Field(None, min_length=1)
    image_size: Size | None = None  # [C,H,W]
    hidden_dim: int | None = None
    num_spatial_blocks: int | None = None
    pretrained_encoder_path: Path | None = None
    use_pretrain: bool | None = None
    freeze_encoder: bool | None = None
    reward_type: Literal["binary", "continuous"] = "binary"
    reward_mode: Literal["per_step", "terminal"] = "per_step"
    reward_weight: float = 1.0
    env_reward_weight: float = 0.0
    smoothing: int = Field(1, ge=1)
    hold: int = Field(1, ge=1)
    accept_unqualified: bool = False
    device: str | None = None

    @model_validator(mode="after")
    def _holds_successes(self) -> RewardModelSettings:
        if self.hold > 1 and self.reward_type != "binary":
            raise ValueError(f"hold is {self.hold}, and a {self.reward_type} reward has no successes to hold")
        return self


class DataCollectionSettings(Strict):
    """`data_collection`: what RewardDataCollector is told."""

    positive_dir: Path = Path("./reward_data/positive")
    negative_dir: Path = Path("./reward_data/negative")
    image_keys: list[str] | None = Field(None, min_length=1)  # default: those of reward_model
    max_positive_trajectories: Count = Field(None, ge=0)  # None: as many as come
    max_negative_trajectories: Count = Field(None, ge=0)


class RewardSettings(Strict):
    """`reward`: whether to collect frames, whether to use a classifier of them, and which."""

    group_name: str = "RewardGroup"
    use_reward_model: bool = False
    collect_data: bool = False
    reward_model: RewardModelSettings = Field(default_factory=RewardModelSettings)
    data_collection: DataCollectionSettings = Field(default_factory=DataCollectionSettings)

    @model_validator(mode="after")
    def _same_keys(self) -> RewardSettings:
        model, collected = self.reward_model.image_keys, self.data_collection.image_keys
        if model and collected and model != collected:
            raise ValueError(f"reward_model.image_keys is {model} and data_collection.image_keys {collected}")
        return self

    @property
    def image_keys(self) -> list[str]:
        """The cameras that either block names."""
        return self.data_collection.image_keys or self.reward_model.image_keys or [IMAGE_KEY]

    @property
    def image_size(self) -> Size:
        """[C,H,W] of the frames."""
        return self.reward_model.image_size or IMAGE_SIZE


class CollectSettings(Strict):
    """A collection: a simulator, a policy written by hand, and where the episodes go.

    `noise` is the share of actions that are random. Without `stop_at_success` an episode goes on for all its
    `max_steps`, so that more frames show the task done.
    """

    env: str
    episodes: int = Field(100, ge=1)
    num_envs: int = Field(8, ge=1)
    policy: Literal["scripted", "random"] = "scripted"
    noise: float = Field(0.3, ge=0, le=1)
    max_steps: int = Field(200, ge=1)
    stop_at_success: bool = False
    seed: int = Field(0, ge=0)
    reward: RewardSettings = Field(default_factory=RewardSettings)
