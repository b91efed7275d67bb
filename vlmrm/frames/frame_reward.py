"""`FrameReward`: a classifier of frames in place of the environment's reward, or beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vlmrm.errors import DataError
from vlmrm.frames.observations import autoreset_mode, frames_of, last_of_episode, own_observation
from vlmrm.frames.scorer import FrameScorer, refuse_unqualified
from vlmrm.frames.settings import RewardModelSettings


class FrameReward(VectorWrapper):
    """Rewards each step of a vector of environments by the frame of the state that it led to.

        reward = reward_weight · learned + env_reward_weight · environment's

    The frame of an episode's last step is its true last one, wherever the environment's way of starting the next
    episode hides it; a step that only starts an episode has the learned reward 0. All frames of a step are one batch.
    `info` gets `frame_probability` [N], of the frames without smoothing, `frame_reward` [N], the learned reward
    without its weight, and `env_reward` [N].

    The environment shows its images as `RewardDataCollector` takes them, one of each camera in a step.

    Args:
        env: a vector environment that names its `autoreset_mode` in its metadata.
        settings: see `RewardModelSettings`.
        scorer: the opened classifier, for several wrappers to share.

    Raises:
        CheckpointError: when the classifier is missing, broken, or does not qualify as a reward.
        ConfigError: when it is not what the settings say, or not for these images.
        DataError: from `step`, when images are missing, or are none.
    """

    def __init__(self, env: VectorEnv, settings: RewardModelSettings, scorer: FrameScorer | None = None):
        super().__init__(env)
        self.settings = settings
        if scorer is not None:
            refuse_unqualified(scorer.config, settings, settings.checkpoint_path or "the classifier")
        self.scorer = scorer or FrameScorer.open(settings)
        self._keys = self.scorer.config.image_keys
        self._mode = autoreset_mode(env)
        self._starting = np.zeros(env.num_envs, dtype=bool)  # those whose next step is a reset
        self._recent = RecentFrames(env.num_envs, settings, self.scorer.config.threshold)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))  # Gymnasium takes it out
        observation, info = self.env.reset(seed=seed, options=options)
        self._recent.forget(mask)
        self._starting[mask] = False
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, env_reward, terminations, truncations, info = self.env.step(actions)
        ended = np.logical_or(terminations, truncations)
        probability = self.scorer.probabilities(self._images(observation, info, ended))
        learned = self._recent.rewards(probability, ended, ignored=self._starting)
        self._recent.forget(ended | self._starting)
        self._starting = ended & (self._mode is AutoresetMode.NEXT_STEP)
        reward = self.settings.reward_weight * learned
        if self.settings.env_reward_weight:  # 0 takes the environment's reward away, NaN or not
            reward = reward + self.settings.env_reward_weight * np.asarray(env_reward, dtype=np.float64)
        seen = {"frame_probability": probability, "frame_reward": learned, "env_reward": np.array(env_reward)}
        everywhere = {f"_{name}": np.ones(self.num_envs, dtype=bool) for name in seen}
        return observation, reward, terminations, truncations, {**info, **seen, **everywhere}

    def _images(self, observation: Any, info: Mapping[str, Any], ended: np.ndarray) -> dict[str, np.ndarray]:
        """The frames of the states that the step led to, uint8 [N,C,H,W] by camera."""
        same_step = self._mode is AutoresetMode.SAME_STEP  # what is shown of the ended is the next episode's
        shown = [
            last_of_episode(i, info) if same_step and ended[i] else (own_observation(i, observation), info)
            for i in range(self.num_envs)
        ]
        return {key: np.stack([self._frame(i, key, *seen) for i, seen in enumerate(shown)]) for key in self._keys}

    def _frame(self, i: int, key: str, observation: Any, info: Mapping[str, Any]) -> np.ndarray:
        frames = frames_of(i, key, observation, info, self.num_envs)
        if len(frames) != 1:
            raise DataError(f"environment {i} showed {len(frames)} frames of {key!r} in a step: a reward is of one.")
        return frames[0]


class RecentFrames:
    """The probabilities that each of N environments' episodes showed last, and the reward that follows from them."""

    def __init__(self, count: int, settings: RewardModelSettings, threshold: float):
        self._settings = settings
        self._threshold = threshold
        self._window = np.full((count, settings.smoothing), np.nan)
        self._held = np.zeros(count, dtype=np.int64)  # successes after one another, up to now

    def rewards(self, probability: np.ndarray, ended: np.ndarray, ignored: np.ndarray) -> np.ndarray:
        """The learned rewards [N] after frames of these probabilities; 0 for the ignored, which are of no step."""
        self._window = np.roll(self._window, 1, axis=1)
        self._window[:, 0] = probability
        smooth = np.nanmean(self._window, axis=1)
        self._held = np.where(smooth > self._threshold, self._held + 1, 0)
        binary = self._settings.reward_type == "binary"
        reward = (self._held >= self._settings.hold).astype(np.float64) if binary else smooth
        given = ended if self._settings.reward_mode == "terminal" else np.ones_like(ended)
        return np.where(given & ~ignored, reward, 0.0)

    def forget(self, which: np.ndarray) -> None:
        """Begins anew for environments that begin an episode."""
        self._window[which] = np.nan
        self._held[which] = 0
