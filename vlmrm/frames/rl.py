"""`vlmrm frames rl`: policies trained by Stable-Baselines3 with the true success, a learned reward, or both.

What a policy is worth is its true success rate, on environments of its own that no training has seen; there an episode
is a success when any of its states is one. A finished run is kept and not repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from vlmrm.errors import ConfigError, DataError
from vlmrm.files import make_folder, write_json, writing
from vlmrm.frames.audit import Counts, RewardAudit, Suspect, suspect_sheet
from vlmrm.frames.rl_settings import RLSettings, Source
from vlmrm.frames.scorer import FrameScorer
from vlmrm.frames.trial import Trial

logger = logging.getLogger("vlmrm")

ALGORITHMS: dict[str, Callable[..., BaseAlgorithm]] = {"ppo": PPO, "sac": SAC}
Act = Callable[[Any], np.ndarray]


@dataclass(frozen=True)
class Point:
    """An evaluation, and what was counted in training since the one before it; counts are 0 without a classifier."""

    steps: int
    true_success_rate: float
    counts: Counts


@dataclass(frozen=True)
class Run:
    """One policy's training: its evaluations in order; `suspects` are the frames of its audit, the worst first."""

    source: Source
    seed: int
    random_success_rate: float  # of actions by chance, on the same episodes
    points: list[Point]
    suspects: list[dict[str, float | int | bool]]
    folder: Path

    @property
    def final(self) -> float:
        """The true success rate of the trained policy."""
        return self.points[-1].true_success_rate

    @property
    def counted(self) -> Counts:
        """The counts of the whole training."""
        return sum((point.counts for point in self.points), Counts())


def train_policies(settings: RLSettings) -> list[Run]:
    """Every source with every seed; those that `output_dir` has are read from there. Seeds torch's random numbers.

    Raises:
        ConfigError: for settings that do not fit the simulator or the classifier, or other runs in `output_dir`.
        CheckpointError: when the classifier is missing or broken.
        DataError: when files cannot be read or written.
    """
    scorer = FrameScorer.open(settings.reward.reward_model) if settings.needs_classifier else None
    if scorer is not None and scorer.config.environment not in (None, settings.env):
        logger.warning("the classifier was trained on %s, not on %s", scorer.config.environment, settings.env)
    trials = [Trial(settings, scorer, source, seed) for seed in settings.seeds for source in settings.sources]
    finished = [_finished(trial) if trial.file.is_file() else None for trial in trials]
    return [there or _run(trial) for there, trial in zip(finished, trials, strict=True)]


def _run(trial: Trial) -> Run:
    env = trial.training_environments()
    audit = env if isinstance(env, RewardAudit) else None
    with closing(trial.observed(env)) as seen:
        policy = untrained_policy(trial, seen)
        make_folder(trial.folder)
        title = f"{trial.source}, seed {trial.seed}"
        with tqdm(total=trial.settings.total_steps, desc=title, unit="step", disable=None) as bar:
            evaluations = _Evaluations(trial, audit, bar)
            by_chance = success_rate(trial, _random(trial))
            policy.learn(trial.settings.total_steps, callback=evaluations)
    suspects = audit.suspects() if audit else []
    described = [suspect.described() for suspect in suspects]
    run = Run(trial.source, trial.seed, by_chance, evaluations.points, described, trial.folder)
    _write(run, trial, policy, suspects)
    return run


def success_rate(trial: Trial, act: Act) -> float:
    """The share of evaluation episodes in which some state truly is a success, with actions `act(observations)`."""
    count = trial.settings.evaluation_episodes
    succeeded, over = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    with closing(trial.observed(trial.evaluation_environments())) as env:
        seen = env.reset()
        while not over.all():
            seen, _, ended, infos = env.step(act(seen))
            succeeded |= ~over & [info["true_success"] for info in infos]
            over |= ended
    return float(succeeded.mean())


class _Evaluations(BaseCallback):
    """Evaluates the policy at the beginning, whenever so many steps are done, and at the end."""

    def __init__(self, trial: Trial, audit: RewardAudit | None, bar: tqdm):
        super().__init__()
        self.points: list[Point] = []
        self._trial = trial
        self._audit = audit
        self._bar = bar

    def _on_training_start(self) -> None:
        self._evaluate()

    def _on_step(self) -> bool:
        self._bar.update(self.training_env.num_envs)
        every = self._trial.settings.evaluate_every
        if self.num_timesteps // every > self.points[-1].steps // every:
            self._evaluate()
        return True

    def _on_training_end(self) -> None:
        if self.points[-1].steps < self.num_timesteps:
            self._evaluate()

    def _evaluate(self) -> None:
        with torch.random.fork_rng():  # the training goes on as if there were no evaluation
            torch.manual_seed(self._trial.seed)
            rate = success_rate(self._trial, lambda seen: self.model.predict(seen)[0])
        counts = self._audit.counts() if self._audit else Counts()
        self.points.append(Point(self.num_timesteps, rate, counts))
        self._bar.set_postfix(true_success=f"{rate:.2f}", false_positives=counts.false_positives)


def untrained_policy(trial: Trial, env: VecEnv) -> BaseAlgorithm:
    """A policy of Stable-Baselines3 with random weights, as the settings have it.

    Raises:
        ConfigError: when the algorithm does not suit the simulator, or the hyperparameters the algorithm.
    """
    settings, continuous = trial.settings, isinstance(env.action_space, gym.spaces.Box)
    name = settings.algorithm or ("sac" if continuous else "ppo")
    if name == "sac" and not continuous:
        raise ConfigError(f"algorithm is sac and the actions of {settings.env} are discrete: choose ppo.")
    policy = "MlpPolicy" if settings.observe == "state" else "CnnPolicy"
    device = "cpu" if settings.observe == "state" else "auto"  # a GPU is slower for a small perceptron
    try:
        built = ALGORITHMS[name](policy, env, seed=trial.seed, **{"device": device, **settings.hyperparameters})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"hyperparameters do not suit {name} of Stable-Baselines3: {error}.") from error
    built.set_logger(Logger(folder=None, output_formats=[]))
    return built


def _random(trial: Trial) -> Act:
    with closing(trial.evaluation_environments()) as env:
        space = env.single_action_space
    space.seed(trial.seed)
    return lambda seen: np.array([space.sample() for _ in seen])


# Runs on disk --------------------------------------------------------------------------------------------------------


def _write(run: Run, trial: Trial, policy: BaseAlgorithm, suspects: list[Suspect]) -> None:
    """The policy and its audit, and last the file that says that the run is finished."""
    content = {
        "settings": trial.fingerprint(),
        "random_success_rate": run.random_success_rate,
        "points": [asdict(point) for point in run.points],
        "suspects": run.suspects,
    }
    with writing(trial.folder):
        policy.save(trial.folder / "policy.zip")
    if suspects:
        suspect_sheet(suspects, trial.folder / "audit.png")
    write_json(trial.file, content)


def _finished(trial: Trial) -> Run:
    try:
        content = json.loads(trial.file.read_text(encoding="utf-8"))
        points = [
            Point(each["steps"], each["true_success_rate"], Counts(**each["counts"])) for each in content["points"]
        ]
        there, by_chance, suspects = content["settings"], content["random_success_rate"], content["suspects"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{trial.file} cannot be read ({error!r}): delete its folder, and it is run anew.") from error
    wanted = trial.fingerprint()
    other = [name for name in {**there, **wanted} if there.get(name) != wanted.get(name)]
    if other:
        values = ", ".join(f"{name} {there.get(name)!r}, not {wanted.get(name)!r}" for name in other)
        raise ConfigError(f"{trial.folder} is a run with {values}: choose another output_dir, or delete it.")
    logger.info("%s was trained before", trial.folder)
    return Run(trial.source, trial.seed, by_chance, points, suspects, trial.folder)
