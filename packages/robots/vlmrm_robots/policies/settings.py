"""Settings of `vlmrm frames rl` and `loop`; importing them needs neither torch nor a simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vlmrm_robots.frames.settings import IMAGE_KEY, IMAGE_SIZE, Crop, EnvironmentSettings, FrameRewardSettings, Size

RewardSource = Literal["success", "learned", "both"]


class RLSettings(EnvironmentSettings):
    """One policy for each source of reward and each seed; everything else is the same for all.

    Episodes of training last `max_steps` even after a success, because their end would give the success away.

    Attributes:
        hyperparameters: keywords of the algorithm's class in Stable-Baselines3, over its own defaults.
        observe: the policy's input: the simulator's `state`, or `images`, its last four frames.
        sources: `success`: 1 for each step to a true success; `learned`: the classifier's reward; `both`: their sum,
            weighted by `reward_model`. Default: as `reward` implies.
        action_repeat: steps of the simulator for each of the policy, by which random actions explore further.
    """

    algorithm: Literal["ppo", "sac"] | None = None  # default: sac for continuous actions, else ppo
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    observe: Literal["state", "images"] = "state"
    sources: list[RewardSource] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    total_steps: int = Field(100_000, ge=1)  # of all environments together
    num_envs: int = Field(8, ge=1)
    max_steps: int = Field(200, ge=1)  # of the simulator, in an episode
    action_repeat: int = Field(1, ge=1)
    evaluate_every: int = Field(10_000, ge=1)  # steps
    evaluation_episodes: int = Field(50, ge=1)
    output_dir: Path = Path("./frames_rl")
    episodes_dir: Path | None = None  # for as many more episodes of each policy, in a folder SOURCE-seedN of its own
    reward: FrameRewardSettings = Field(default_factory=FrameRewardSettings)

    @model_validator(mode="after")
    def _check_rewards(self) -> RLSettings:
        model = self.reward.reward_model
        if model.end_at_success:
            raise ValueError("episodes of training last max_steps, also with a success: leave end_at_success out")
        if not self.sources:
            learned: RewardSource = "both" if model.env_reward_weight else "learned"
            self.sources = [learned if self.reward.use_reward_model else "success"]
        for name, values in (("sources", self.sources), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} is {values}, which names one twice")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds is {self.seeds}: a seed is at least 0")
        if self.needs_classifier and not self.reward.use_reward_model:
            raise ValueError(f"sources is {self.sources} and reward.use_reward_model is false: set it to true")
        if "both" in self.sources and not model.env_reward_weight:
            raise ValueError("sources has both, and reward_model.env_reward_weight is 0: give it a weight")
        if self.needs_classifier and not model.reward_weight:
            raise ValueError("reward_model.reward_weight is 0, which takes the learned reward away")
        return self

    @property
    def needs_classifier(self) -> bool:
        return self.sources != ["success"]


class LoopSettings(EnvironmentSettings):
    """Rounds of a classifier and a policy with its reward, each measured on the policy's episodes.

    Attributes:
        demonstrator: the policy of the first episodes, as `policy` of `vlmrm frames collect`.
        train: options of `vlmrm frames train`, but for folders and files.
        policy: keys of `vlmrm frames rl`, but for the environment, `sources`, `reward` and folders.
        reward_model: how the classifier rewards the policy (see `RewardModelSettings`). With `accept_unqualified` one
            that does not qualify teaches a policy too, whose episodes join the data; its round does not hold.
    """

    demonstrator: str = "scripted"
    rounds: int = Field(3, ge=1)  # at most
    episodes: int = Field(40, ge=1)  # of the demonstrator, at first
    random_episodes: int = Field(25, ge=0)  # of random actions, at first
    max_steps: int = Field(200, ge=1)  # of those
    image_keys: list[str] = Field(default_factory=lambda: [IMAGE_KEY], min_length=1)
    image_size: Size = IMAGE_SIZE
    crop: Crop = Field(default_factory=dict)  # as `data_collection` has it
    min_precision: float = Field(0.9, gt=0, lt=1)  # of the rewards of a policy's episodes: 95 % sure not to be less
    max_false_fires: float = Field(0.5, gt=0, lt=1)  # share of failed episodes that are rewarded: 95 % sure
    min_success: float = Field(0.9, ge=0)  # times that of the same training with the true success as the reward
    seed: int = Field(0, ge=0)
    train: dict[str, Any] = Field(default_factory=dict)
    policy: dict[str, Any] = Field(default_factory=dict)
    reward_model: dict[str, Any] = Field(default_factory=dict)
    output_dir: Path = Path("./frames_loop")
