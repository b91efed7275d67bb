"""The settings of `vlmrm frames rl`: a simulator, a policy's training, and which rewards to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vlmrm.frames.settings import RewardSettings
from vlmrm.settings import Strict

Source = Literal["success", "learned", "both"]


class RLSettings(Strict):
    """Trains one policy for each source of reward and each seed, all alike but for these.

    Episodes of training last `max_steps`, also after a success: their end would tell the policy of it.

    Attributes:
        env: a simulator of `vlmrm.frames.environments`.
        algorithm: `ppo`, or `sac`, which needs continuous actions. Default: sac where they are.
        hyperparameters: keywords of that class of Stable-Baselines3; what is left out is its own default.
        observe: what the policy sees: `state`, the simulator's, or `images`, the last four frames.
        sources: `success`: 1 for each step to a state that truly is one; `learned`: the classifier's reward; `both`:
            their sum, weighted by `reward_model`. Default: what `reward` says.
        seeds: of the policy, its actions and the episodes.
        total_steps: of all environments together.
        num_envs: environments that are played side by side.
        max_steps: length of an episode, in steps of the simulator.
        action_repeat: steps of the simulator for each of the policy, which by chance tries more that way.
        evaluate_every: steps between evaluations.
        evaluation_episodes: of each; an evaluation begins from the same states every time, and has them from no
            training.
        output_dir: folder of the runs and of their comparison.
    """

    env: str
    algorithm: Literal["ppo", "sac"] | None = None
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    observe: Literal["state", "images"] = "state"
    sources: list[Source] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    total_steps: int = Field(100_000, ge=1)
    num_envs: int = Field(8, ge=1)
    max_steps: int = Field(200, ge=1)
    action_repeat: int = Field(1, ge=1)
    evaluate_every: int = Field(10_000, ge=1)
    evaluation_episodes: int = Field(50, ge=1)
    output_dir: Path = Path("./frames_rl")
    reward: RewardSettings = Field(default_factory=RewardSettings)

    @model_validator(mode="after")
    def _has_rewards(self) -> RLSettings:
        model = self.reward.reward_model
        if not self.sources:
            supervised = "both" if model.env_reward_weight else "learned"
            self.sources = [supervised if self.reward.use_reward_model else "success"]
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
        """Whether a source has a learned reward in it."""
        return self.sources != ["success"]
