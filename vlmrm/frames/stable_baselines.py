"""A Gymnasium vector of environments as Stable-Baselines3 takes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from stable_baselines3.common.vec_env import VecEnv

from vlmrm.private_names import relies_on

relies_on(VecEnv, "_get_indices")


class StableBaselinesEnv(VecEnv):
    """Environments of `make_environments`, which start the next episode in the step that ends one.

    The policy observes their states, or with `image_key` the frames of that camera, uint8 [C,H,W]. The infos have
    `true_success`, of the state that a step led to, besides what Stable-Baselines3 asks for.
    """

    def __init__(self, env: VectorEnv, image_key: str | None = None, image_size: Sequence[int] = ()):
        self.env = env
        self._image_key = image_key
        space = env.single_observation_space
        if image_key is not None:
            space = gym.spaces.Box(0, 255, tuple(image_size), np.uint8)
        super().__init__(env.num_envs, space, env.single_action_space)

    def reset(self) -> Any:
        return self._observed(*self.env.reset())

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, rewards, terminations, truncations, info = self.env.step(self._actions)
        ended = terminations | truncations
        infos: list[dict[str, Any]] = [{"true_success": bool(value)} for value in info["true_success"]]
        for i in np.flatnonzero(ended):
            infos[i]["TimeLimit.truncated"] = bool(truncations[i] and not terminations[i])
            infos[i]["terminal_observation"] = self._observed(info["final_obs"], info["final_info"])[i]
        return self._observed(observation, info), rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        self.env.close()

    def _observed(self, observation: Any, info: dict[str, Any]) -> Any:
        return observation if self._image_key is None else info["images"][self._image_key]

    # What VecEnv has for other libraries' wrappers -------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("a vector of environments is set up before its training")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("a vector of environments has no methods of single ones")

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))
