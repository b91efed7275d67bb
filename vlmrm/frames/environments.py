"""Simulators as vectors of environments: offscreen frames, and the true success of every state.

What a policy observes is the simulator's state; `info` has `images`, by camera key uint8 [C,H,W], and `success`, both
of the state that the observation tells of, after a reset as after a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from PIL import Image

from vlmrm.errors import ConfigError
from vlmrm.frames.choices import IMAGE_KEY, IMAGE_SIZE
from vlmrm.frames.simulators import simulator_named


def make_environments(
    name: str,
    count: int,
    *,
    seed: int,
    image_size: Sequence[int] = IMAGE_SIZE,
    keys: Sequence[str] = (IMAGE_KEY,),
    stop_at_success: bool = True,
    max_steps: int | None = None,
    action_repeat: int = 1,
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
) -> VectorEnv:
    """`count` environments of one simulator; environment i starts from `seed` + i.

    `image_size` is [C,H,W], with one channel for grey; without `keys` nothing is drawn. Without `stop_at_success` an
    episode goes on after the task is done, until `max_steps`, so that more of its frames show it done. Each action is
    taken `action_repeat` times; states between are not shown, but a success among them ends the repetition.

    Raises:
        ConfigError: for a simulator, a size or cameras that there are not.
    """
    simulator = simulator_named(name)
    channels, height, width = _checked_size(image_size)
    if len(keys) > 1:
        raise ConfigError(
            f"{name} has one camera, and {len(keys)} image keys were given ({', '.join(keys)}): give one."
        )
    if count < 1:
        raise ConfigError(f"{count} environments cannot be made: one is the least.")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame without a display
    os.environ.setdefault("MUJOCO_GL", "egl")
    options = simulator.options(height, width)
    if max_steps is not None:
        options["max_episode_steps"] = max_steps

    def make(number: int) -> gym.Env:
        env = simulator.prepare(gym.make(name, render_mode="rgb_array", **options))
        simulator.screen(env, height, width)
        env = Success(env, simulator.success, stop_at_success)
        if action_repeat > 1:
            env = Repeated(env, action_repeat)
        if keys:
            env = Frames(env, keys[0], (channels, height, width))
        return Seeded(env, seed + number)

    return SyncVectorEnv([partial(make, number) for number in range(count)], autoreset_mode=autoreset_mode)


class Success(gym.Wrapper):
    """Says in `info` whether the state is a `success`, and ends the episode there, or lets it go on."""

    def __init__(self, env: gym.Env, success: Callable[[gym.Env], bool], stop: bool):
        super().__init__(env)
        self._success = success
        self._stop = stop

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "success": self._success(self.env)}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        success = self._success(self.env)
        terminated = self._stop if success else bool(terminated)
        return observation, reward, terminated, truncated, {**info, "success": success}


class Repeated(gym.Wrapper):
    """Takes each action `times` times, or until the task is done or the episode over."""

    def __init__(self, env: gym.Env, times: int):
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated or info["success"]:
                break
        return observation, total, terminated, truncated, info


class Frames(gym.Wrapper):
    """Puts the frame of each state into `info`, uint8 [C,H,W], as that of a camera."""

    def __init__(self, env: gym.Env, key: str, size: tuple[int, int, int]):
        super().__init__(env)
        self._key = key
        self._size = size

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, "images": {self._key: self._frame()}}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, "images": {self._key: self._frame()}}

    def _frame(self) -> np.ndarray:
        channels, height, width = self._size
        picture = Image.fromarray(np.ascontiguousarray(self.env.render()))
        picture = picture.resize((width, height), Image.Resampling.BOX)
        pixels = np.asarray(picture) if channels == 3 else np.asarray(picture.convert("L"))[..., None]
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class Seeded(gym.Wrapper):
    """Gives the first reset a seed, unless it has one; later ones go on with its random numbers."""

    def __init__(self, env: gym.Env, seed: int):
        super().__init__(env)
        self._seed: int | None = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first, self._seed = self._seed, None
        return self.env.reset(seed=first if seed is None else seed, options=options)


class TrueSuccess(VectorWrapper):
    """Rewards 1 for each step to a state that truly is a success, otherwise 0; `info` gets `true_success` [N].

    For environments that start the next episode in the step that ends one: of the ended, the last state counts.
    """

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, _, terminations, truncations, info = self.env.step(actions)
        ended = terminations | truncations
        success = np.array(info["success"], dtype=bool)
        success[ended] = np.asarray(info["final_info"]["success"])[ended] if ended.any() else False
        everywhere = np.ones(self.num_envs, dtype=bool)
        info = {**info, "true_success": success, "_true_success": everywhere}
        return observation, success.astype(np.float64), terminations, truncations, info


def _checked_size(size: Sequence[int]) -> tuple[int, int, int]:
    if len(size) != 3 or size[0] not in (1, 3) or min(size) < 1:
        raise ConfigError(f"image_size is {list(size)}: it is [C,H,W], with 1 or 3 channels.")
    channels, height, width = size
    return channels, height, width
