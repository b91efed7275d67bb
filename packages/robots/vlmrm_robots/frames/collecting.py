"""`vlmrm frames collect`: plays episodes of an environment with a policy, and stores their labelled frames.

Episode j of a seed is the same in whichever environment it is played, so an interrupted collection resumes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from tqdm import tqdm

from vlmrm.errors import ConfigError
from vlmrm.plugins import imported_function
from vlmrm_robots.frames.collector import RewardDataCollector
from vlmrm_robots.frames.environments import make_environments
from vlmrm_robots.frames.settings import CollectSettings
from vlmrm_robots.frames.simulators import SIMULATORS, Simulator
from vlmrm_robots.trajectories.trajectory import check_images, open_trajectory, trajectory_paths

logger = logging.getLogger("vlmrm")

Policy = Callable[[Any], Any]


@dataclass(frozen=True)
class Collected:
    """The trajectories that a collection wrote, and the counts of all their frames."""

    positive: list[Path]
    negative: list[Path]
    frames: int
    successes: int
    seconds: float
    earlier: int  # episodes of an earlier collection
    full: bool  # both folders have reached their limits


def collect(settings: CollectSettings) -> Collected:
    """Play the episodes that the folders do not have yet."""
    reward, data = settings.reward, settings.reward.data_collection
    if not reward.collect_data and "collect_data" in reward.model_fields_set:
        raise ConfigError("reward.collect_data is false, and so nothing would be collected: set it to true.")
    seeds = _missing_seeds(settings)
    env = make_environments(
        settings.env,
        max(1, min(settings.num_envs, len(seeds))),
        seed=settings.seed,
        image_size=reward.image_size,
        keys=reward.image_keys,
        crop=reward.crop,
        success=settings.success,
        env_options=settings.env_options,
        stop_at_success=settings.stop_at_success,
        max_steps=settings.max_steps,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    policy = _policy_of(settings)
    options: Any = {**data.folders(), "environment": settings.env, "metadata": _declared(settings)}
    collector = RewardDataCollector(env, image_keys=reward.image_keys, **options)
    started = time.perf_counter()
    with closing(collector), tqdm(total=len(seeds), desc=settings.env, unit="episode", disable=None) as bar:
        if seeds and not collector.full:
            _play(collector, settings, policy, seeds, bar)
    seconds = time.perf_counter() - started
    written = [open_trajectory(path) for paths in collector.written.values() for path in paths]
    failures_wanted = settings.policy == "random" and settings.success is None
    if written and not failures_wanted and not trajectory_paths(data.positive_dir):
        logger.warning("no episode has a success so far: raise max_steps, choose another policy, or check success")
    return Collected(
        collector.written[True],
        collector.written[False],
        frames=sum(map(len, written)),
        successes=sum(int(file.successes.sum()) for file in written),
        seconds=seconds,
        earlier=settings.episodes - len(seeds),
        full=collector.full,
    )


def _declared(settings: CollectSettings) -> dict[str, str]:
    """Return what trajectories say of their labels and of their actions."""
    played = settings.policy if settings.policy == "random" else f"{settings.policy}, noise {settings.noise:g}"
    return {"played": played, "declared_success": settings.success or "the simulator's"}


def _missing_seeds(settings: CollectSettings) -> list[int]:
    """Return the seeds of the episodes that the folders lack, after a check that their frames are of the same kind."""
    declared = _declared(settings)
    reward, stored = settings.reward, set()
    for folder in (reward.data_collection.positive_dir, reward.data_collection.negative_dir):
        files = [open_trajectory(path) for path in trajectory_paths(folder)]
        check_images(folder, files, reward.image_keys, reward.image_size)
        others = {file.metadata.get("environment") for file in files} - {None, settings.env}
        if others:
            names = ", ".join(sorted(map(str, others)))
            logger.warning("%s has episodes of %s too: name another folder, or both are of one task", folder, names)
        for file in files:
            if file.metadata.get("environment") != settings.env:
                continue
            labelled = file.metadata.get("declared_success", declared["declared_success"])
            if labelled != declared["declared_success"]:
                before = f"{file.path} was labelled by {labelled}"
                raise ConfigError(f"success is {declared['declared_success']}, and {before}: name another folder.")
            complete = file.metadata.get("ended") == "true"
            if complete and file.metadata.get("played", declared["played"]) == declared["played"]:
                stored.add(file.metadata.get("seed"))
    seeds = [episode_seed(settings.seed, number) for number in range(settings.episodes)]
    return [seed for seed in seeds if str(seed) not in stored]


def episode_seed(seed: int, number: int) -> int:
    """Return the seed of an episode, which differs from those of collections with other seeds."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _play(
    collector: RewardDataCollector, settings: CollectSettings, policy: Policy | None, seeds: list[int], bar: tqdm
) -> None:
    """Play one episode of each seed, as many at a time as there are environments."""
    noise = 1.0 if settings.policy == "random" else settings.noise
    space = collector.single_action_space
    waiting = iter(seeds)
    playing: list[int | None] = [next(waiting) for _ in range(collector.num_envs)]  # None has nothing more to play
    # A generator for each episode makes it the same beside any others.
    generators = [np.random.default_rng(seed) for seed in playing]
    observations, _ = collector.reset(seed=playing)
    try:
        while any(seed is not None for seed in playing) and not collector.full:
            actions = _actions(settings, policy, observations, collector)
            for i, generator in enumerate(generators):
                if generator.random() < noise:
                    actions[i] = _random_action(space, generator)
            observations, _, terminations, truncations, _ = collector.step(actions)
            ended = terminations | truncations
            if not ended.any():
                continue
            for i in np.flatnonzero(ended):
                bar.update(playing[i] is not None)
                playing[i] = next(waiting, None)
                generators[i] = np.random.default_rng(playing[i])
            bar.set_postfix(positive=len(collector.written[True]), negative=len(collector.written[False]))
            observations, _ = collector.reset(seed=playing, options={"reset_mask": ended})
            for i in np.flatnonzero(ended):
                if playing[i] is None:
                    collector.discard(i)  # a vector steps all its environments, also those without an episode
    finally:
        for i in range(collector.num_envs):
            collector.discard(i)  # the same command plays those under way anew


def _actions(settings: CollectSettings, policy: Policy | None, observations: Any, env: VectorEnv) -> np.ndarray:
    """Return an action for each environment; ConfigError where the policy returns another shape."""
    space = env.single_action_space
    if policy is None:
        return np.array([space.sample() for _ in range(env.num_envs)])
    actions = np.array(policy(observations))
    expected = [env.num_envs, *(space.shape or ())]
    if list(actions.shape) != expected:
        shape = f"{list(actions.shape)}, and those of {settings.env} are {expected}"
        raise ConfigError(
            f"policy {settings.policy} returns actions of shape {shape}: return one of each observation."
        )
    return actions


def _policy_of(settings: CollectSettings) -> Policy | None:
    """Return the policy, from observations [N] to actions [N]; None plays at random."""
    if settings.policy == "random":
        return None
    module, _, name = settings.policy.rpartition(":")
    if module:
        return imported_function(module, name, f"policy {settings.policy}")
    policy = SIMULATORS.get(settings.env, Simulator()).policy
    if settings.policy != "scripted" or policy is None:
        what = f"{settings.env} has no scripted policy" if policy is None else f"there is no policy {settings.policy}"
        raise ConfigError(f"{what}: give policy random, or module:function from observations to actions.")
    return policy


def _random_action(space: gym.Space, generator: np.random.Generator) -> Any:
    if isinstance(space, gym.spaces.Discrete):
        return int(generator.integers(space.n)) + space.start
    if isinstance(space, gym.spaces.Box) and space.is_bounded():
        return generator.uniform(space.low, space.high).astype(space.dtype)
    space.seed(int(generator.integers(2**31)))
    return space.sample()


def summarise(collected: Collected) -> str:
    """Return the counts of a collection in a sentence or two."""
    rate = collected.frames / collected.seconds if collected.seconds else 0.0
    text = (
        f"{len(collected.positive)} positive and {len(collected.negative)} negative trajectories, {collected.frames} "
        f"frames of which {collected.successes} show success, {rate:.0f} a second"
    )
    if collected.earlier:
        text += f"; {collected.earlier} episodes were collected before, and another --seed plays others"
    if collected.full:
        text += "; both folders hold as many as they may"
    return text
