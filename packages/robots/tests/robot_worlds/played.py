"""An environment whose frames are as bright as a list says, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Played(gym.Env):
    """After step t its frame has brightness[t]; the last one ends the episode. Subclasses say in `shown` what is seen.

    Each step has the environment's own `reward`.
    """

    observation_space = gym.spaces.Box(0, 255, (1,))
    action_space = gym.spaces.Discrete(2)
    reward: float

    def __init__(self, brightness: list[int]):
        self.brightness = brightness

    @property
    def images(self) -> dict[str, np.ndarray]:
        return {"base_camera": np.full((3, 2, 2), self.brightness[self.t], dtype=np.uint8)}

    def shown(self) -> tuple[Any, dict[str, Any]]:
        """Observation and info of the present state."""
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.shown()

    def step(self, action):
        self.t += 1
        observation, info = self.shown()
        return observation, self.reward, self.t == len(self.brightness) - 1, False, info
