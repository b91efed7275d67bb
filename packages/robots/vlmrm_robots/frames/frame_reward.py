"""`FrameReward`: a classifier of frames in place of the environment's reward, or beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm_robots.frames.checkpoint import LoadedClassifier, load_classifier
from vlmrm_robots.frames.classifier import ClassifierConfig, model_input
from vlmrm_robots.frames.collector import autoreset_mode, reset_mask, state_after, with_own
from vlmrm_robots.frames.images import Views, as_array
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.trajectories.trajectory import to_uint8

logger = logging.getLogger("vlmrm")

# The settings that must be the checkpoint's, if they are given.
MATCHED = ("image_keys", "image_size", "hidden_dim", "num_spatial_blocks", "freeze_encoder")


class FrameReward(VectorWrapper):
    """Rewards each step of a vector environment by the frame of the state that it led to.

        reward = reward_weight · learned + env_reward_weight · environment's

    At an episode's end that is its true last frame; a step that only starts an episode has the learned reward 0.
    `info` gets `frame_probability` [N], `frame_reward` [N], without its weight, and `env_reward` [N]. The environment
    has an `autoreset_mode` in its metadata, and shows images as `RewardDataCollector` takes them, one in a step.
    Several wrappers may share a `scorer`.
    """

    def __init__(self, env: VectorEnv, settings: RewardModelSettings, scorer: FrameScorer | None = None):
        super().__init__(env)
        self.settings = settings
        if scorer is not None:
            _refuse_unqualified(scorer.config, settings, scorer.path)
        self.scorer = scorer or FrameScorer.open(settings)
        config, shown = self.scorer.config, env.metadata.get("crop")
        if shown not in (None, config.crop):
            trained = config.crop or "whole frames"
            raise ConfigError(f"the environment shows the crop {shown}, and the classifier was trained on {trained}.")
        crop = config.crop if shown is None else {}  # it may have cropped them itself
        self._views = Views(config.image_keys, config.image_size, crop)
        self._mode = autoreset_mode(env)
        self._starting = np.zeros(env.num_envs, dtype=bool)  # the environments whose next step is a reset
        self._streak = np.zeros(env.num_envs, dtype=np.int64)  # successes in a row up to now

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = reset_mask(self.num_envs, options)
        observation, info = self.env.reset(seed=seed, options=options)
        self._streak[mask], self._starting[mask] = 0, False
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, env_reward, terminations, truncations, info = self.env.step(actions)
        settings = self.settings
        ended = np.logical_or(as_array(terminations), as_array(truncations))
        probability = self.scorer.probabilities(self._images(observation, info, ended))
        self._streak = np.where(probability > self.scorer.config.threshold, self._streak + 1, 0)
        rewarded = ended if settings.reward_mode == "terminal" else np.ones_like(ended)
        seen = probability if settings.reward_type == "continuous" else (self._streak >= settings.hold).astype(float)
        learned = np.where(rewarded & ~self._starting, seen, 0.0)
        self._streak[ended | self._starting] = 0
        self._starting = ended & (self._mode is AutoresetMode.NEXT_STEP)
        reward = settings.reward_weight * learned
        if settings.env_reward_weight:  # not 0 times a NaN
            reward = reward + settings.env_reward_weight * as_array(env_reward).astype(np.float64)
        own = {"frame_probability": probability, "frame_reward": learned, "env_reward": np.array(as_array(env_reward))}
        return observation, reward, terminations, truncations, with_own(info, **own)

    def _images(self, observation: Any, info: Mapping[str, Any], ended: np.ndarray) -> dict[str, np.ndarray]:
        """Return the frames of the states that the step led to, uint8 [N,C,H,W] by camera."""
        states = [state_after(i, self._mode, ended, observation, info) for i in range(self.num_envs)]
        scaled = [self._views.of(i, *state, self.num_envs) for i, state in enumerate(states)]
        return {key: np.concatenate([images[key] for images in scaled]) for key in self._views.keys}


class FrameScorer:
    """Scores frames in one batch; a frame's probability does not depend on the others in it.

    Warns of a classifier that does not qualify as a reward, or was never measured.
    """

    def __init__(self, loaded: LoadedClassifier):
        self.model, self.config, self.path = loaded.model, loaded.config, loaded.path
        if not self.config.qualified:
            problem = f"does not qualify as a reward: {self.config.unqualified_because}; it is used all the same"
            if self.config.qualified is None:
                problem = "does not say whether it qualifies as a reward: measure it before it trains a policy"
            logger.warning("%s %s.", loaded.path, problem)

    @classmethod
    def open(cls, settings: RewardModelSettings) -> FrameScorer:
        """Load the classifier of `settings.checkpoint_path`."""
        path = settings.checkpoint_path
        if path is None:
            raise ConfigError("reward_model has no checkpoint_path: name a classifier of `vlmrm frames train`.")
        loaded = load_classifier(path, image_size=settings.image_size, device=settings.device)
        _refuse_unqualified(loaded.config, settings, path)
        ours, theirs = (one.model_dump(mode="json", include={*MATCHED}) for one in (settings, loaded.config))
        for name in MATCHED:
            inferred = name == "freeze_encoder" and not loaded.described
            if ours[name] not in (None, theirs[name]) and not inferred:
                values = f"{ours[name]} in the configuration and {theirs[name]} in {path}"
                raise ConfigError(f"{name} is {values}: leave it out, or name the checkpoint that was meant.")
        if settings.use_pretrain not in (None, loaded.config.use_pretrain):
            values = (settings.use_pretrain, loaded.config.use_pretrain, path)
            logger.warning("use_pretrain is %s in the configuration and %s in %s, which is used.", *values)
        if (threshold := settings.threshold) is not None:
            before = loaded.config.threshold
            if threshold < before and loaded.config.qualified is not None and not settings.accept_unqualified:
                raise ConfigError(
                    f"threshold is {threshold:.4g} and {path} was qualified at {before:.4g}, above which it rewards "
                    "failures less often: measure it there with `vlmrm frames qualify`, or use it as it is with "
                    "accept_unqualified: true."
                )
            logger.warning("threshold is %.4g, in place of %.4g in %s", threshold, before, path)
            loaded = replace(loaded, config=loaded.config.model_copy(update={"threshold": threshold}))
        return cls(loaded)

    def probabilities(self, images: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """Return P(success) [N], float64, of frames [N,C,H,W] by camera, uint8 or floats in [0, 1].

        Floats are rounded to bytes, as those of training were.
        """
        inputs = {}
        for key, frames in images.items():
            array = to_uint8(as_array(frames), f"the images {key!r}")
            inputs[key] = model_input(torch.from_numpy(array), self.model.device)
        with torch.inference_mode():
            return torch.sigmoid(self.model(inputs).double()).cpu().numpy()


def _refuse_unqualified(config: ClassifierConfig, settings: RewardModelSettings, name: object) -> None:
    if config.qualified is False and not settings.accept_unqualified:
        raise CheckpointError(
            f"{name} does not qualify as a reward: {config.unqualified_because}: train it on more episodes or for "
            "longer, or use it as it is with accept_unqualified: true."
        )
