"""Simulators with a scripted policy, and the true success of every one of their states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from vlmrm.libraries import relies_on


@dataclass(frozen=True)
class Simulator:
    """A simulator's task: when a state is a success, a policy that solves it, and how its frames are drawn.

    Without `success`, settings declare it. `options` are keywords of `gymnasium.make` for frames of a height and
    width; `prepare` turns observations into plain states, and draws small if that is quicker.
    """

    success: Callable[[gym.Env], bool] | None = None
    policy: Callable[[np.ndarray], np.ndarray] | None = None
    options: Callable[[int, int], dict[str, Any]] = lambda height, width: {}
    prepare: Callable[[gym.Env, int, int], gym.Env] = lambda env, height, width: env


def _scaled(env: gym.Env, height: int, width: int) -> gym.Env:
    """Scale the state to [-1, 1] for networks: a car's velocity is at most 0.07, an arm's 28."""
    return gym.wrappers.RescaleObservation(env, np.float32(-1), np.float32(1))


def _along_velocity(observations: np.ndarray, index: int) -> np.ndarray:
    """Push along a velocity of the state, which always adds energy: action 2 forwards, 0 backwards."""
    return np.where(observations[:, index] >= 0, 2, 0)


def _prepare_acrobot(env: Any, height: int, width: int) -> gym.Env:
    # Acrobot draws on a square of any size: twice the frame's is quick, and scales down smoothly.
    env.unwrapped.SCREEN_DIM = 2 * max(height, width)
    return _scaled(env, height, width)


def _acrobot_success(env: Any) -> bool:
    """Return whether the tip is above the line."""
    first, second = env.unwrapped.state[:2]
    return bool(-np.cos(first) - np.cos(first + second) > 1.0)


def _car_success(env: Any) -> bool:
    """Return whether the car is at the flag, in whichever direction it moves: a frame shows no velocities."""
    return bool(env.unwrapped.state[0] >= env.unwrapped.goal_position)


def _continuous_car_policy(observations: np.ndarray) -> np.ndarray:
    return (_along_velocity(observations, 1)[:, None] - 1).astype(np.float32)


def _lake_success(env: Any) -> bool:
    """Return whether the elf stands at the goal."""
    lake = env.unwrapped
    return bool(lake.desc.flat[lake.s] == b"G")


def _lake_policy(observations: np.ndarray) -> np.ndarray:
    """Walk around the holes of the 4x4 map that does not slip: left 0, down 1, right 2, up 3."""
    actions = np.array([1, 2, 1, 0, 1, 1, 1, 0, 2, 1, 1, 0, 1, 2, 2, 0])
    return actions[observations]


class _GridState(gym.ObservationWrapper):
    """MiniGrid's agent as float32 [column, row, direction]; direction is 0 for right, 1 for down, 2, 3."""

    def __init__(self, env: Any, height: int, width: int):
        super().__init__(env)
        env.unwrapped.highlight = False  # the agent's field of view is not part of the task
        side = max(env.unwrapped.width, env.unwrapped.height)
        self.observation_space = gym.spaces.Box(0, max(side, 3), (3,), np.float32)

    def observation(self, observation: Any) -> np.ndarray:
        agent: Any = self.env.unwrapped
        return np.array([*agent.agent_pos, agent.agent_dir], dtype=np.float32)


def _grid_success(env: Any) -> bool:
    """Return whether the agent stands on the green square."""
    grid = env.unwrapped
    cell = grid.grid.get(*grid.agent_pos)
    return cell is not None and cell.type == "goal"


def _grid_policy(observations: np.ndarray) -> np.ndarray:
    """Go right along the wall, then down: the goal of the empty room is in its far corner."""
    column, _, direction = observations.T
    target = np.where(column < 3, 0, 1)
    turn_right = (target - direction) % 4 == 1
    return np.where(direction == target, 2, np.where(turn_right, 1, 0)).astype(np.int64)


def _prepare_reach(env: Any, height: int, width: int) -> gym.Env:
    relies_on(type(env.unwrapped), "_get_obs", "_is_success")
    return gym.wrappers.FlattenObservation(env)


def _reach_success(env: Any) -> bool:
    """Return whether the gripper is at the red dot."""
    arm = env.unwrapped
    goals = arm._get_obs()
    return bool(arm._is_success(goals["achieved_goal"], goals["desired_goal"]))


def _reach_policy(observations: np.ndarray) -> np.ndarray:
    """Go straight to the dot; observations are the gripper's position, the dot's, and the arm's state."""
    direction = np.clip(10 * (observations[:, 3:6] - observations[:, :3]), -1, 1)
    return np.concatenate([direction, np.zeros((len(direction), 1))], axis=1).astype(np.float32)


SIMULATORS = {
    "Acrobot-v1": Simulator(_acrobot_success, partial(_along_velocity, index=5), prepare=_prepare_acrobot),
    "MountainCar-v0": Simulator(_car_success, partial(_along_velocity, index=1), prepare=_scaled),
    "MountainCarContinuous-v0": Simulator(_car_success, _continuous_car_policy, prepare=_scaled),
    "FrozenLake-v1": Simulator(_lake_success, _lake_policy, lambda height, width: {"is_slippery": False}),
    "MiniGrid-Empty-5x5-v0": Simulator(_grid_success, _grid_policy, prepare=_GridState),
    "FetchReach-v4": Simulator(
        _reach_success, _reach_policy, lambda height, width: {"height": height, "width": width}, _prepare_reach
    ),
}
