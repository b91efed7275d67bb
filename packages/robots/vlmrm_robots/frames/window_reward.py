"""`WindowReward`: what a reward says of the last frames, as a VLM judge or a model of progress, as an RL reward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from PIL import Image

from vlmrm.errors import ConfigError
from vlmrm.formats.flow_factory import conversation_to_sample, write_sample
from vlmrm.rewards import RewardSet
from vlmrm.rewards.ranks import world_size
from vlmrm.scoring.protocol import prefixes_of
from vlmrm_robots.frames.collector import autoreset_mode, observation_of, reset_mask, state_after, with_own
from vlmrm_robots.frames.images import Views, as_array
from vlmrm_robots.trajectories.pictures import as_picture


class WindowReward(VectorWrapper):
    """Rewards steps of a vector environment by a reward set, which looks at the last frames of each environment.

        envs = WindowReward(envs, "judge.yaml", task="Put the cube into the bowl.", image_key="top")

    A window is judged after each `every` steps of an episode and at its end; other steps have no learned reward. All
    windows of one step are one round of the set: its judges are asked at once, its models compute one batch, and its
    `on_failure` decides where one fails, `raise` or `fallback`. `info` gets `window_reward` [N], NaN where no window
    was judged, and `env_reward` [N]. The environment shows images as `RewardDataCollector` takes them.

    Args:
        rewards: a reward set, or its YAML file. Each sample is the task and, as the answer, the frames as images.
        task: the prompt; an environment whose `info` has a `task` says its own.
        image_key: the camera.
        window: how many frames; None for all since the episode began.
        every: steps between two judgements; default: `window`, so that each frame is seen once.
        shaping: the discount γ. The step's reward is then γ·Φ' - Φ of the potential Φ, the last judgement, 0 before
            the first one and after the end: it changes no best policy (Ng et al. 1999, Policy invariance under
            reward transformations).
        env_reward_weight: of the environment's own reward, which is added.
    """

    def __init__(
        self,
        env: VectorEnv,
        rewards: RewardSet | str | Path,
        *,
        task: str,
        image_key: str,
        window: int | None = 5,
        every: int | None = None,
        shaping: float | None = None,
        env_reward_weight: float = 0.0,
    ):
        super().__init__(env)
        if min(window or 1, every or 1) < 1 or (window is None and every is None):
            raise ConfigError(f"window {window} and every {every}: write numbers above 0; all frames need an `every`.")
        if shaping is not None and not 0 < shaping <= 1:
            raise ConfigError(f"shaping is {shaping}: write a discount above 0 and up to 1.")
        if world_size() > 1:
            raise ConfigError(
                "windows end at other steps on each rank, and a reward set waits for all: use a service."
            )
        self.rewards = rewards if isinstance(rewards, RewardSet) else RewardSet(rewards)
        for reward in self.rewards.rewards:
            if reward.groupwise or reward.arguments.on_failure == "mask":
                wrong = "compares answers" if reward.groupwise else "masks failures, and a step needs a number"
                raise ConfigError(f"reward {reward.arguments.name} {wrong}: take a pointwise one that does not.")
        self.task, self.every, self.shaping = task, every or window or 1, shaping
        self.env_reward_weight = env_reward_weight
        self._views = Views([image_key], None, {})
        self._mode = autoreset_mode(env)
        self._frames = [deque[Image.Image](maxlen=window) for _ in range(env.num_envs)]
        self._steps = np.zeros(env.num_envs, dtype=np.int64)  # of the episode
        self._potential = np.zeros(env.num_envs)
        self._starting = np.zeros(env.num_envs, dtype=bool)  # the environments whose next step is a reset

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = reset_mask(self.num_envs, options)
        observation, info = self.env.reset(seed=seed, options=options)
        self._start(np.flatnonzero(mask), observation, info)
        self._starting[mask] = False
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, env_reward, terminations, truncations, info = self.env.step(actions)
        terminated = as_array(terminations).astype(bool)
        ended = terminated | as_array(truncations).astype(bool)
        stepped = np.flatnonzero(~self._starting)
        for i in stepped:
            self._add(i, *state_after(i, self._mode, ended, observation, info))
        self._steps[stepped] += 1
        due = ~self._starting & (ended | (self._steps % self.every == 0))
        judged = np.full(self.num_envs, np.nan)
        judged[due] = self._judged(np.flatnonzero(due), info)
        learned = self._shaped(judged, terminated) if self.shaping else np.nan_to_num(judged)
        begun = ended if self._mode is AutoresetMode.SAME_STEP else self._starting
        self._start(np.flatnonzero(begun), observation, info)
        self._starting = ended & (self._mode is AutoresetMode.NEXT_STEP)
        if self.env_reward_weight:  # not 0 times a NaN
            learned = learned + self.env_reward_weight * as_array(env_reward).astype(np.float64)
        own = {"window_reward": judged, "env_reward": np.array(as_array(env_reward))}
        return observation, learned, terminations, truncations, with_own(info, **own)

    def _shaped(self, judged: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        """Return γ·Φ' - Φ [N]; a truncated episode would have gone on, and keeps its potential."""
        assert self.shaping is not None
        after = np.where(terminated, 0.0, np.where(np.isnan(judged), self._potential, judged))
        before, self._potential = self._potential, after
        return np.where(self._starting, 0.0, self.shaping * after - before)

    def _judged(self, due: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
        """Return the reward of the windows of the environments `due`, float64."""
        if not len(due):
            return np.zeros(0)
        tasks = info.get("task", [self.task] * self.num_envs)
        samples = [write_sample(conversation_to_sample(prefixes_of(tasks[i], [*self._frames[i]])[-1])) for i in due]
        names = dict.fromkeys(name for sample in samples for name in sample)
        columns: dict[str, Sequence[Any]] = {name: [sample.get(name) for sample in samples] for name in names}
        return self.rewards(prompt=columns.pop("prompt"), **columns).total()

    def _start(self, environments: np.ndarray, observation: Any, info: Mapping[str, Any]) -> None:
        """Begin an episode with the frame that the environments show."""
        for i in environments:
            self._frames[i].clear()
            self._steps[i], self._potential[i] = 0, 0.0
            self._add(i, observation_of(i, observation), info)

    def _add(self, i: int, observation: Any, info: Mapping[str, Any]) -> None:
        [frames] = self._views.of(i, observation, info, self.num_envs).values()
        self._frames[i].append(as_picture(frames[0]))
