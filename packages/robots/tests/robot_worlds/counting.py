"""An environment whose frames tell what they are: its number, episode, step and success are their pixels."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


def picture(number: int, episode: int, step: int, success: bool, side: int = 4) -> np.ndarray:
    """uint8 [3,side,side]."""
    pixels = np.zeros((3, side, side), dtype=np.uint8)
    pixels[:, 0, 0] = episode, step, 255 * success
    pixels[0, 1, 1] = number
    return pixels


def told(frame: np.ndarray) -> tuple[int, int, int, bool]:
    """Number, episode, step and success that a frame tells of."""
    return int(frame[0, 1, 1]), *map(int, frame[:2, 0, 0]), bool(frame[2, 0, 0])


class Counting(gym.Env):
    """Environment `number` ends its episodes after 3 + number steps; those of even number succeed at the last step."""

    observation_space = gym.spaces.Box(0, 255, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int, keys: tuple[str, ...] = ("cam",), where: str = "info", label_resets: bool = True):
        self.number, self.keys, self.where, self.label_resets = number, keys, where, label_resets
        self.episode, self.now = -1, 0
        if where == "observation":
            images = {key: gym.spaces.Box(0, 255, (3, 4, 4), np.uint8) for key in keys}
            self.observation_space = gym.spaces.Dict({"images": gym.spaces.Dict(images)})

    @property
    def length(self) -> int:
        return 3 + self.number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        observation, info = self._shown()
        return observation, info if self.label_resets else {"images": info["images"]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        observation, info = self._shown()
        over = self.now == self.length
        return observation, 0.0, over and self.number % 2 == 0, over and self.number % 2 == 1, info

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        success = self.now == self.length and self.number % 2 == 0
        images = {key: picture(self.number, self.episode, self.now, success) for key in self.keys}
        if self.where == "observation":
            return {"images": images}, {"success": success}
        return np.zeros(1, dtype=np.float32), {"images": images, "success": success}


def counting(count: int, mode: AutoresetMode = AutoresetMode.SAME_STEP, **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Counting, number, **options) for number in range(count)], autoreset_mode=mode)
