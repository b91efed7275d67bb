"""One policy's training as it is set up: its environments, their rewards, and what the policy sees of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from vlmrm.errors import ConfigError
from vlmrm.frames.audit import RewardAudit
from vlmrm.frames.collecting import episode_seed
from vlmrm.frames.collector import RewardDataCollector
from vlmrm.frames.environments import TrueSuccess, make_environments
from vlmrm.frames.frame_reward import FrameReward
from vlmrm.frames.rl_settings import RLSettings, Source
from vlmrm.frames.scorer import FrameScorer
from vlmrm.frames.settings import RewardModelSettings
from vlmrm.frames.stable_baselines import StableBaselinesEnv

VERSION = 2  # of how policies are trained and measured
FRAMES = 4  # that a policy sees at once: one shows no velocities
SMALLEST_SEEN = 36  # pixels; the convolutions of Stable-Baselines3 need them
REWARDING = {"reward_type", "reward_mode", "reward_weight", "env_reward_weight", "smoothing", "hold"}
TRAINING, EVALUATION = 0, 1  # episodes of a seed, by what they are for


@dataclass(frozen=True)
class Trial:
    """One source with one seed."""

    settings: RLSettings
    scorer: FrameScorer | None
    source: Source
    seed: int

    @property
    def folder(self) -> Path:
        return self.settings.output_dir / f"{self.source}-seed{self.seed}"

    @property
    def file(self) -> Path:
        """What a finished run leaves last."""
        return self.folder / "run.json"

    @property
    def image_keys(self) -> list[str]:
        reward = self.settings.reward
        return list(self.scorer.config.image_keys) if self.scorer else reward.image_keys

    @property
    def image_size(self) -> tuple[int, int, int]:
        return self.scorer.config.image_size if self.scorer else self.settings.reward.image_size

    @property
    def reward_model(self) -> RewardModelSettings:
        """How the classifier's reward is made; the true success has no weight where it is not asked for."""
        model = self.settings.reward.reward_model
        return model if self.source == "both" else model.model_copy(update={"env_reward_weight": 0.0})

    def fingerprint(self) -> dict[str, Any]:
        """What the run's outcome depends on."""
        about: dict[str, Any] = {"version": VERSION}
        about |= self.settings.model_dump(mode="json", exclude={"sources", "seeds", "output_dir", "reward"})
        about["image_size"] = list(self.image_size)
        model = self.reward_model
        if self.source != "success" and model.checkpoint_path is not None:
            about["reward_model"] = model.model_dump(mode="json", include=REWARDING)
            about["checkpoint_sha256"] = hashlib.sha256(model.checkpoint_path.read_bytes()).hexdigest()
        return about

    def training_environments(self) -> VectorEnv:
        """Rewarded by the source, audited where a classifier is a part of it, and collected from where asked for."""
        settings, reward = self.settings, self.settings.reward
        learned = self.source != "success"
        env = self._environments(settings.num_envs, TRAINING, reward.collect_data or learned, stop_at_success=False)
        if reward.collect_data:
            data = reward.data_collection
            limits = (data.max_positive_trajectories, data.max_negative_trajectories)
            env = RewardDataCollector(
                env, data.positive_dir, data.negative_dir, self.image_keys, *limits, environment=settings.env
            )
        env = TrueSuccess(env)
        if not learned:
            return env
        return RewardAudit(FrameReward(env, self.reward_model, self.scorer))

    def evaluation_environments(self) -> VectorEnv:
        """One for each episode, from the same states each time."""
        return TrueSuccess(
            self._environments(self.settings.evaluation_episodes, EVALUATION, False, stop_at_success=True)
        )

    def _environments(self, count: int, purpose: int, drawn: bool, *, stop_at_success: bool) -> VectorEnv:
        drawn = drawn or self.settings.observe == "images"
        return make_environments(
            self.settings.env,
            count,
            seed=episode_seed(self.seed, purpose),
            image_size=self.image_size,
            keys=self.image_keys if drawn else (),
            stop_at_success=stop_at_success,
            max_steps=self.settings.max_steps,
            action_repeat=self.settings.action_repeat,
            autoreset_mode=AutoresetMode.SAME_STEP,
        )

    def observed(self, env: VectorEnv) -> VecEnv:
        """What Stable-Baselines3 is given of environments."""
        if self.settings.observe == "state":
            return StableBaselinesEnv(env)
        if min(self.image_size[1:]) < SMALLEST_SEEN:
            raise ConfigError(
                f"observe is images and image_size is {list(self.image_size)}: a policy that sees needs frames of "
                f"{SMALLEST_SEEN} pixels at least."
            )
        return VecFrameStack(StableBaselinesEnv(env, self.image_keys[0], self.image_size), FRAMES)
