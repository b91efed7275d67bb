"""`FrameReward`: a classifier of frames in place of the environment's reward, or beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from scipy.special import expit
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm_robots.frames.checkpoint import LoadedClassifier, load_classifier
from vlmrm_robots.frames.classifier import ClassifierConfig, model_input
from vlmrm_robots.frames.collector import autoreset_mode, final_state, observation_of, reset_mask
from vlmrm_robots.frames.drift import DriftWatch
from vlmrm_robots.frames.images import as_array, check_one_size, fitted_images, images_of
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.trajectories.trajectory import to_uint8

logger = logging.getLogger("vlmrm")

# The settings that must be the checkpoint's, if they are given.
MATCHED = ("image_keys", "image_size", "hidden_dim", "num_spatial_blocks", "freeze_encoder")


class FrameReward(VectorWrapper):
    """Rewards each step of a vector environment by the frame of the state that it led to.

        reward = reward_weight · learned + env_reward_weight · environment's

    At an episode's end that is its true last frame, whichever autoreset mode hides it; a step that only starts an
    episode has the learned reward 0. All frames of a step are one batch. `info` gets `frame_probability` [N], without
    smoothing, `frame_reward` [N], without its weight, `env_reward` [N], and `frame_novelty` [N]: above 1 for frames
    unlike the training's, NaN if the checkpoint does not know those. Many of them are warned of. With
    `end_at_success` an episode terminates where the classifier sees its success.

    Args:
        env: a vector environment with an `autoreset_mode` in its metadata that shows images as `RewardDataCollector`
            takes them, one of each camera in a step. Those of another size than the classifier's are scaled as
            `vlmrm frames collect` scales them.
        settings: see `RewardModelSettings`.
        scorer: the opened classifier, for several wrappers to share.
    """

    def __init__(self, env: VectorEnv, settings: RewardModelSettings, scorer: FrameScorer | None = None):
        super().__init__(env)
        self.settings = settings
        if scorer is not None:
            _refuse_unqualified(scorer.config, settings, scorer.path)
        self.scorer = scorer or FrameScorer.open(settings)
        self._keys = self.scorer.config.image_keys
        reference = self.scorer.reference
        self._watch = DriftWatch(reference, self._keys, self.scorer.path) if reference else None
        shown = env.metadata.get("crop")
        if shown is not None and shown != self.scorer.config.crop:
            raise ConfigError(
                f"the environment shows the crop {shown}, and the classifier was trained on "
                f"{self.scorer.config.crop or 'whole frames'}: give the environment that crop."
            )
        self._crop = self.scorer.config.crop if shown is None else {}  # it may have cropped them itself
        self._mode = autoreset_mode(env)
        if settings.end_at_success and self._mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                "end_at_success ends episodes that the environment would go on with: make it with "
                "autoreset_mode=AutoresetMode.DISABLED, and reset those that have ended."
            )
        self._starting = np.zeros(env.num_envs, dtype=bool)  # the environments whose next step is a reset
        self._sizes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(env.num_envs)]  # of the frames shown
        self._recent = RecentFrames(env.num_envs, settings, self.scorer.config.threshold)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = reset_mask(self.num_envs, options)
        observation, info = self.env.reset(seed=seed, options=options)
        self._forget(mask)
        self._starting[mask] = False
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, env_reward, terminations, truncations, info = self.env.step(actions)
        ended = np.logical_or(as_array(terminations), as_array(truncations))
        probability, novelty = self.scorer.scores(self._images(observation, info, ended))
        if self._watch is not None:
            self._watch.update(novelty[~self._starting], probability[~self._starting])
        self._recent.add(probability)
        if self.settings.end_at_success:
            terminations = np.logical_or(as_array(terminations), self._recent.succeeded)
            ended |= terminations
        learned = self._recent.rewards(ended, ignored=self._starting)
        self._forget(ended | self._starting)
        self._starting = ended & (self._mode is AutoresetMode.NEXT_STEP)
        reward = self.settings.reward_weight * learned
        if self.settings.env_reward_weight:  # not 0 times a NaN
            reward = reward + self.settings.env_reward_weight * as_array(env_reward).astype(np.float64)
        values = {
            "frame_probability": probability,
            "frame_reward": learned,
            "env_reward": np.array(as_array(env_reward)),
        }
        values["frame_novelty"] = novelty.max(axis=1)
        present = {f"_{name}": np.ones(self.num_envs, dtype=bool) for name in values}
        return observation, reward, terminations, truncations, {**info, **values, **present}

    def close(self, **kwargs: Any) -> None:
        """Say what has drifted since the last look, and close the environments."""
        if self._watch is not None:
            self._watch.look()
        super().close(**kwargs)

    def _forget(self, mask: np.ndarray) -> None:
        self._recent.forget(mask)
        for i in np.flatnonzero(mask):
            self._sizes[i].clear()

    def _images(self, observation: Any, info: Mapping[str, Any], ended: np.ndarray) -> dict[str, np.ndarray]:
        """Return the frames of the states that the step led to, uint8 [N,C,H,W] by camera."""
        same_step = self._mode is AutoresetMode.SAME_STEP  # of ended environments, it shows the next episode's start
        states = [
            final_state(i, info) if same_step and ended[i] else (observation_of(i, observation), info)
            for i in range(self.num_envs)
        ]
        shown = [images_of(i, self._keys, *state, self.num_envs) for i, state in enumerate(states)]
        for i, images in enumerate(shown):
            for key, frames in images.items():
                if len(frames) != 1:
                    raise DataError(
                        f"environment {i} showed {len(frames)} frames of {key!r} in a step: a reward is of one."
                    )
            check_one_size(f"environment {i}", images, self._sizes[i])
        scaled = [fitted_images(images, self.scorer.config.image_size, self._crop) for images in shown]
        return {key: np.concatenate([images[key] for images in scaled]) for key in self._keys}


class RecentFrames:
    """The latest probabilities of N environments' episodes, and the rewards that follow from them."""

    def __init__(self, count: int, settings: RewardModelSettings, threshold: float):
        self._settings = settings
        self._threshold = threshold
        self._window = np.full((count, settings.smoothing), np.nan)
        self._streak = np.zeros(count, dtype=np.int64)  # successes in a row up to now

    def add(self, probability: np.ndarray) -> None:
        """Take the probabilities [N] of the next frames."""
        self._window = np.roll(self._window, 1, axis=1)
        self._window[:, 0] = probability
        self._streak = np.where(self._smooth > self._threshold, self._streak + 1, 0)

    @property
    def _smooth(self) -> np.ndarray:
        return np.nanmean(self._window, axis=1)  # NaN stands for the frames before the episode's first

    @property
    def succeeded(self) -> np.ndarray:
        """Which environments [N] show a success, for as many frames as it has to hold."""
        return self._streak >= self._settings.hold

    def rewards(self, ended: np.ndarray, ignored: np.ndarray) -> np.ndarray:
        """Return the learned rewards [N] of the latest frames; 0 for the ignored environments."""
        binary = self._settings.reward_type == "binary"
        reward = self.succeeded.astype(np.float64) if binary else self._smooth
        rewarded = ended if self._settings.reward_mode == "terminal" else np.ones_like(ended)
        return np.where(rewarded & ~ignored, reward, 0.0)

    def forget(self, mask: np.ndarray) -> None:
        """Start anew for environments that begin an episode."""
        self._window[mask] = np.nan
        self._streak[mask] = 0


class FrameScorer:
    """Scores frames in one batch; a frame's probability does not depend on the others in it.

    Warns of a classifier that does not qualify as a reward, or was never measured.
    """

    def __init__(self, loaded: LoadedClassifier):
        self.model = loaded.model
        self.config = loaded.config
        self.reference = loaded.reference
        self.path = loaded.path
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
        for name in MATCHED:
            setting, trained = _as_list(getattr(settings, name)), _as_list(getattr(loaded.config, name))
            inferred = name == "freeze_encoder" and not loaded.described
            if setting is not None and setting != trained and not inferred:
                raise ConfigError(
                    f"{name} is {setting} in the configuration and {trained} in {path}: leave it out, or name the "
                    "checkpoint that was meant."
                )
        if settings.use_pretrain not in (None, loaded.config.use_pretrain):
            values = (settings.use_pretrain, loaded.config.use_pretrain, path)
            logger.warning("use_pretrain is %s in the configuration and %s in %s, which is used.", *values)
        if settings.threshold is not None:
            loaded = replace(loaded, config=_with_threshold(loaded.config, settings, settings.threshold))
        return cls(loaded)

    def probabilities(self, images: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """Return P(success) [N], float64, of frames [N,C,H,W] by camera, uint8 or floats in [0, 1].

        Floats are rounded to bytes, as those of training were.
        """
        return self.scores(images)[0]

    def scores(self, images: Mapping[str, np.ndarray | Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Return `probabilities`, and how unlike the training's the frames of each camera are [N,K].

        See `Reference.novelty`; NaN if the checkpoint does not know that.
        """
        inputs = {key: self._input(key, frames) for key, frames in images.items()}
        with torch.inference_mode():
            encoded = self.model.encode(inputs)
            probabilities = expit(self.model.decide(encoded).cpu().double().numpy())
            if self.reference is None:
                return probabilities, np.full((len(probabilities), len(self.config.image_keys)), np.nan)
            return probabilities, self.reference.novelty(self.model.features(encoded)).cpu().double().numpy()

    def _input(self, key: str, frames: np.ndarray | Tensor) -> Tensor:
        array = frames.numpy(force=True) if isinstance(frames, Tensor) else np.asarray(frames)
        return model_input(torch.from_numpy(to_uint8(array, f"the images {key!r}")), self.model.device)


def _refuse_unqualified(config: ClassifierConfig, settings: RewardModelSettings, name: object) -> None:
    if config.qualified is False and not settings.accept_unqualified:
        raise CheckpointError(
            f"{name} does not qualify as a reward: {config.unqualified_because}: train it on more episodes or for "
            "longer, or use it as it is with accept_unqualified: true."
        )


def _with_threshold(config: ClassifierConfig, settings: RewardModelSettings, threshold: float) -> ClassifierConfig:
    if threshold < config.threshold and config.qualified is not None and not settings.accept_unqualified:
        raise ConfigError(
            f"threshold is {threshold:.4g} and {settings.checkpoint_path} was qualified at {config.threshold:.4g}, "
            "above which it rewards failures less often: measure it there with `vlmrm frames eval`, or use "
            "it as it is with accept_unqualified: true."
        )
    logger.warning("threshold is %.4g, in place of %.4g in %s", threshold, config.threshold, settings.checkpoint_path)
    return config.model_copy(update={"threshold": threshold})


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, (tuple, list)) else value
