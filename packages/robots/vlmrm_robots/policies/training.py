"""`vlmrm frames rl`: policies trained by Stable-Baselines3 with the true success, a learned reward, or both.

A policy is measured by its true success rate in environments that no training has seen: the share of episodes in which
any state is a success. Finished runs are kept and not repeated.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from vlmrm.errors import ConfigError, DataError
from vlmrm.files import content_digest, make_folder, plain_write_errors, write_json
from vlmrm_robots.frames.classifier import ClassifierConfig
from vlmrm_robots.frames.collecting import episode_seed
from vlmrm_robots.frames.collector import RewardDataCollector
from vlmrm_robots.frames.environments import make_environments
from vlmrm_robots.frames.frame_reward import FrameReward, FrameScorer
from vlmrm_robots.frames.settings import (
    FrameRewardSettings,
    RewardModelSettings,
    RewardSource,
    RLSettings,
    check_same,
)
from vlmrm_robots.policies.environments import Counts, RewardAudit, StableBaselinesEnv, TrueSuccess

logger = logging.getLogger("vlmrm")

VERSION = 6  # of the training and its measurement; other runs are not mixed with these
ALGORITHMS: dict[str, Callable[..., BaseAlgorithm]] = {"ppo": PPO, "sac": SAC}
# Settings of `reward_model` on which a learned reward depends.
REWARD_KEYS = {"reward_type", "reward_mode", "reward_weight", "env_reward_weight", "hold", "threshold"}
TRAINING, EVALUATION, DEMONSTRATION = 0, 1, 2  # numbers by which `episode_seed` keeps their environments apart
Act = Callable[[Any], np.ndarray]  # observations to actions


@dataclass(frozen=True)
class Point:
    """An evaluation, and the counts of the training since the one before; all 0 without a classifier."""

    steps: int
    true_success_rate: float
    counts: Counts


@dataclass(frozen=True)
class PolicyRun:
    """One policy's training, with its evaluations in order: [0] before it, [-1] of the trained policy."""

    source: RewardSource
    seed: int
    random_success_rate: float  # of random actions, on the same episodes
    points: list[Point]
    folder: Path
    unqualified_because: str | None = None  # of its classifier, which was used all the same

    @property
    def final(self) -> float:
        return self.points[-1].true_success_rate

    @property
    def counts(self) -> Counts:
        return sum((point.counts for point in self.points), Counts())


def train_policies(settings: RLSettings) -> list[PolicyRun]:
    """Train a policy with each source and seed, or read its finished run. Seeds torch's random numbers."""
    scorer = FrameScorer.open(settings.reward.reward_model) if settings.needs_classifier else None
    if scorer is not None:
        config, crop = scorer.config, settings.reward.crop
        if crop not in ({}, config.crop):
            trained = config.crop or "whole frames"
            raise ConfigError(f"crop is {crop}, and the classifier was trained on {trained}: leave it out.")
        if config.environment not in (None, settings.env):
            logger.warning("the classifier was trained on %s, not on %s", config.environment, settings.env)
    trials = [Trial(settings, scorer, source, seed) for seed in settings.seeds for source in settings.sources]
    # All are read before any is trained, so that a mismatch is reported at once.
    finished = [_read_run(trial) if trial.file.is_file() else None for trial in trials]
    return [run or _train_policy(trial) for run, trial in zip(finished, trials, strict=True)]


def _train_policy(trial: Trial) -> PolicyRun:
    env = trial.training_environments()
    audit = env if isinstance(env, RewardAudit) else None
    with closing(StableBaselinesEnv(env)) as adapted:
        policy = untrained_policy(trial, adapted)
        make_folder(trial.folder)
        evaluations = _Evaluations(trial, audit)
        random_rate = success_rate(trial)
        policy.learn(trial.settings.total_steps, callback=evaluations)
    if trial.settings.episodes_dir is not None:
        collect_episodes(trial, policy, episodes_folder(trial.settings, trial.source, trial.seed))
    with plain_write_errors(trial.folder):
        policy.save(trial.folder / "policy.zip")
    content = {
        "settings": trial.fingerprint(),
        "random_success_rate": random_rate,
        "points": [asdict(point) for point in evaluations.points],
    }
    write_json(trial.file, content)  # last: it marks the run as finished
    return trial.run(random_rate, evaluations.points)


def untrained_policy(trial: Trial, env: VecEnv) -> BaseAlgorithm:
    """Return a policy with random weights; ConfigError if simulator, algorithm and hyperparameters do not fit."""
    settings, continuous = trial.settings, isinstance(env.action_space, gym.spaces.Box)
    name = settings.algorithm or ("sac" if continuous else "ppo")
    if name == "sac" and not continuous:
        raise ConfigError(f"algorithm is sac and the actions of {settings.env} are discrete: choose ppo.")
    options = {"device": "cpu", **settings.hyperparameters}  # a GPU is slower for a small perceptron
    try:
        built = ALGORITHMS[name]("MlpPolicy", env, seed=trial.seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"hyperparameters do not suit {name} of Stable-Baselines3: {error}.") from error
    # Its default logger would print tables between the updates of the progress bar.
    built.set_logger(Logger(folder=None, output_formats=[]))
    return built


def success_rate(trial: Trial, act: Act | None = None) -> float:
    """Return the share of evaluation episodes with a true success, with actions `act(observations)` or at random."""
    with closing(StableBaselinesEnv(trial.evaluation_environments())) as env:
        env.action_space.seed(trial.seed)
        return float(play(env, act).mean())


def play(env: VecEnv, act: Act | None) -> np.ndarray:
    """Play until each environment has ended an episode; return whether that had a true success: [N]."""
    succeeded, over = np.zeros(env.num_envs, dtype=bool), np.zeros(env.num_envs, dtype=bool)
    observations: Any = env.reset()
    while not over.all():
        actions = (
            np.array([env.action_space.sample() for _ in range(env.num_envs)]) if act is None else act(observations)
        )
        observations, _, ended, infos = env.step(actions)
        succeeded |= ~over & [info["true_success"] for info in infos]
        over |= ended
    return succeeded


def episodes_folder(settings: RLSettings, source: RewardSource, seed: int) -> Path:
    """Return the folder in `episodes_dir` for the episodes of one policy."""
    return (settings.episodes_dir or settings.output_dir) / f"{source}-seed{seed}"


def collect_episodes(trial: Trial, policy: BaseAlgorithm, folder: Path) -> None:
    """Store `evaluation_episodes` more episodes of a policy in `folder/positive` and `folder/negative`.

    They replace those of an interrupted run.
    """
    count = trial.settings.evaluation_episodes
    shutil.rmtree(folder, ignore_errors=True)
    env = trial.environments(count, DEMONSTRATION, True, stop_at_success=False)
    collector = RewardDataCollector(
        env, folder / "positive", folder / "negative", trial.images.image_keys, environment=trial.settings.env
    )
    with closing(StableBaselinesEnv(TrueSuccess(collector))) as adapted, torch.random.fork_rng():
        torch.manual_seed(trial.seed)
        play(adapted, lambda observations: policy.predict(observations)[0])
        for i in range(count):
            collector.discard(i)  # the beginning of another episode


class _Evaluations(BaseCallback):
    """Evaluates the policy at the beginning, after every `evaluate_every` steps, and at the end."""

    def __init__(self, trial: Trial, audit: RewardAudit | None):
        super().__init__()
        self.points: list[Point] = []
        self._trial, self._audit = trial, audit

    def _on_training_start(self) -> None:
        self._evaluate()

    def _on_step(self) -> bool:
        every = self._trial.settings.evaluate_every
        if self.num_timesteps // every > self.points[-1].steps // every:
            self._evaluate()
        return True

    def _on_training_end(self) -> None:
        if self.points[-1].steps < self.num_timesteps:
            self._evaluate()

    def _evaluate(self) -> None:
        with torch.random.fork_rng():  # the training continues as if there were no evaluation
            torch.manual_seed(self._trial.seed)
            rate = success_rate(self._trial, lambda observations: self.model.predict(observations)[0])
        counts = self._audit.counts() if self._audit else Counts()
        self.points.append(Point(self.num_timesteps, rate, counts))
        where = f"{self._trial.source}, seed {self._trial.seed}, step {self.num_timesteps}"
        false = f", {counts.false_positives} of {counts.rewarded} rewards without one" if self._audit else ""
        logger.info("%s: true success %.2f%s", where, rate, false)


@dataclass(frozen=True)
class Trial:
    """One source with one seed: its environments, its rewards, and the policy's view of them."""

    settings: RLSettings
    scorer: FrameScorer | None
    source: RewardSource
    seed: int

    @property
    def folder(self) -> Path:
        return self.settings.output_dir / f"{self.source}-seed{self.seed}"

    @property
    def file(self) -> Path:
        return self.folder / "run.json"

    def run(self, random_rate: float, points: list[Point]) -> PolicyRun:
        doubt = self.scorer.config.unqualified_because if self.scorer and self.source != "success" else None
        return PolicyRun(self.source, self.seed, random_rate, points, self.folder, doubt)

    @property
    def images(self) -> ClassifierConfig | FrameRewardSettings:
        """The `image_keys` and `image_size` of the frames: the classifier's if there is one."""
        return self.scorer.config if self.scorer else self.settings.reward

    @property
    def reward_model(self) -> RewardModelSettings:
        """The settings of the learned reward; the true success has a weight in the source `both` alone."""
        model = self.settings.reward.reward_model
        return model if self.source == "both" else model.model_copy(update={"env_reward_weight": 0.0})

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that the run's outcome depends on."""
        without = {"sources", "seeds", "output_dir", "episodes_dir", "reward"}
        fingerprint = {"version": VERSION, **self.settings.model_dump(mode="json", exclude=without)}
        fingerprint["image_size"] = list(self.images.image_size)
        model = self.reward_model
        if self.source != "success" and model.checkpoint_path is not None:
            fingerprint["reward_model"] = model.model_dump(mode="json", include=REWARD_KEYS)
            fingerprint["checkpoint_sha256"] = content_digest(model.checkpoint_path)
        return fingerprint

    def training_environments(self) -> VectorEnv:
        """Return environments with the source's reward, audited if it is learned, and collected from if so set."""
        settings, reward = self.settings, self.settings.reward
        learned = self.source != "success"
        env = self.environments(settings.num_envs, TRAINING, reward.collect_data or learned, stop_at_success=False)
        if reward.collect_data:
            folders = reward.data_collection.folders()
            env = RewardDataCollector(env, image_keys=self.images.image_keys, environment=settings.env, **folders)
        env = TrueSuccess(env)
        return RewardAudit(FrameReward(env, self.reward_model, self.scorer)) if learned else env

    def evaluation_environments(self) -> VectorEnv:
        """Return one environment for each episode, with the same initial states each time."""
        count = self.settings.evaluation_episodes
        return TrueSuccess(self.environments(count, EVALUATION, False, stop_at_success=True))

    def environments(self, count: int, purpose: int, drawn: bool, *, stop_at_success: bool) -> VectorEnv:
        """Return `count` environments of a purpose, with frames if `drawn`."""
        return make_environments(
            self.settings.env,
            count,
            seed=episode_seed(self.seed, purpose),
            image_size=self.images.image_size,
            keys=self.images.image_keys if drawn else (),
            crop=self.images.crop,
            success=self.settings.success,
            env_options=self.settings.env_options,
            flat=True,
            stop_at_success=stop_at_success,
            max_steps=self.settings.max_steps,
            action_repeat=self.settings.action_repeat,
            autoreset_mode=AutoresetMode.SAME_STEP,
        )


def _read_run(trial: Trial) -> PolicyRun:
    try:
        content = json.loads(trial.file.read_text(encoding="utf-8"))
        points = [
            Point(point["steps"], point["true_success_rate"], Counts(**point["counts"])) for point in content["points"]
        ]
        settings, random_rate = content["settings"], content["random_success_rate"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{trial.file} cannot be read ({error!r}): delete its folder, and it is run anew.") from error
    refusal = f"{trial.folder} is a run with {{}}: choose another output_dir, or delete it."
    check_same(settings, trial.fingerprint(), refusal)
    logger.info("%s was trained before", trial.folder)
    return trial.run(random_rate, points)
