"""The simulators: what counts as success in a state, a policy written by hand that gets there, and how they draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from vlmrm.errors import ConfigError
from vlmrm.private_names import relies_on

Policy = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Simulator:
    """What there is to know about a simulator.

    `success` says whether the task is done in the present state, `policy` solves it, `options` are keywords of
    `gymnasium.make` for frames of a height and width, `prepare` makes its observations a plain state, and `screen` has
    it draw small, where that is quicker.
    """

    success: Callable[[gym.Env], bool]
    policy: Policy
    options: Callable[[int, int], dict[str, Any]] = lambda height, width: {}
    prepare: Callable[[gym.Env], gym.Env] = lambda env: env
    screen: Callable[[gym.Env, int, int], None] = lambda env, height, width: None


def _scaled(env: gym.Env) -> gym.Env:
    """The state from -1 to 1, as networks need it: a car's velocity is at most 0.07, an arm's 28."""
    return gym.wrappers.RescaleObservation(env, np.float32(-1), np.float32(1))


def _small_acrobot(env: Any, height: int, width: int) -> None:
    """Acrobot draws on a square of any size: one of twice the frame's is drawn quickly and scales down smoothly."""
    env.unwrapped.SCREEN_DIM = 2 * max(height, width)


def _acrobot_success(env: Any) -> bool:
    """The tip is above the line."""
    first, second = env.unwrapped.state[:2]
    return bool(-np.cos(first) - np.cos(first + second) > 1.0)


def _acrobot_policy(observations: np.ndarray) -> np.ndarray:
    """Torque along the second joint's velocity always adds energy."""
    return np.where(observations[:, 5] >= 0, 2, 0)


def _car_success(env: Any) -> bool:
    """The car is at the flag, wherever it is going: a frame does not show velocities."""
    return bool(env.unwrapped.state[0] >= env.unwrapped.goal_position)


def _car_policy(observations: np.ndarray) -> np.ndarray:
    """Pushing along the velocity always adds energy."""
    return np.where(observations[:, 1] >= 0, 2, 0)


def _continuous_car_policy(observations: np.ndarray) -> np.ndarray:
    return np.where(observations[:, 1:2] >= 0, 1.0, -1.0).astype(np.float32)


class _GridState(gym.ObservationWrapper):
    """MiniGrid's agent as float32 [column, row, direction]; direction is 0 for right, 1 for down, 2, 3."""

    def __init__(self, env: Any):
        super().__init__(env)
        side = max(env.unwrapped.width, env.unwrapped.height)
        self.observation_space = gym.spaces.Box(0, max(side, 3), (3,), np.float32)

    def observation(self, observation: Any) -> np.ndarray:
        agent: Any = self.env.unwrapped
        return np.array([*agent.agent_pos, agent.agent_dir], dtype=np.float32)


def _make_grid(env: Any) -> gym.Env:
    env.unwrapped.highlight = False  # what the agent sees is not part of the task
    return _GridState(env)


def _grid_success(env: Any) -> bool:
    """The agent stands on the green square."""
    grid = env.unwrapped
    cell = grid.grid.get(*grid.agent_pos)
    return cell is not None and cell.type == "goal"


def _grid_policy(observations: np.ndarray) -> np.ndarray:
    """Right along the wall, then down: the goal of the empty room is in its far corner."""
    column, _, direction = observations.T
    wanted = np.where(column < 3, 0, 1)
    turn_right = (wanted - direction) % 4 == 1
    return np.where(direction == wanted, 2, np.where(turn_right, 1, 0)).astype(np.int64)


def _lake_success(env: Any) -> bool:
    """The elf stands at the goal."""
    lake = env.unwrapped
    return bool(lake.desc.flat[lake.s] == b"G")


def _lake_policy(observations: np.ndarray) -> np.ndarray:
    """The way around the holes of the 4x4 map that does not slip: left 0, down 1, right 2, up 3."""
    actions = np.array([1, 2, 1, 0, 1, 1, 1, 0, 2, 1, 1, 0, 1, 2, 2, 0])
    return actions[observations]


def _make_reach(env: Any) -> gym.Env:
    relies_on(type(env.unwrapped), "_get_obs", "_is_success")
    return gym.wrappers.FlattenObservation(env)


def _reach_success(env: Any) -> bool:
    """The gripper is at the red dot."""
    arm = env.unwrapped
    seen = arm._get_obs()
    return bool(arm._is_success(seen["achieved_goal"], seen["desired_goal"]))


def _reach_policy(observations: np.ndarray) -> np.ndarray:
    """Straight towards the dot; observations are the gripper's place, the dot's, and the arm's state."""
    way = np.clip(10 * (observations[:, 3:6] - observations[:, :3]), -1, 1)
    return np.concatenate([way, np.zeros((len(way), 1))], axis=1).astype(np.float32)


SIMULATORS = {
    "Acrobot-v1": Simulator(_acrobot_success, _acrobot_policy, prepare=_scaled, screen=_small_acrobot),
    "MountainCar-v0": Simulator(_car_success, _car_policy, prepare=_scaled),
    "MountainCarContinuous-v0": Simulator(_car_success, _continuous_car_policy, prepare=_scaled),
    "FrozenLake-v1": Simulator(_lake_success, _lake_policy, lambda height, width: {"is_slippery": False}),
    "MiniGrid-Empty-5x5-v0": Simulator(_grid_success, _grid_policy, prepare=_make_grid),
    "FetchReach-v4": Simulator(
        _reach_success,
        _reach_policy,
        lambda height, width: {"height": height, "width": width},
        _make_reach,
    ),
}
PACKAGES = {"MiniGrid": ("minigrid", "frames"), "Fetch": ("gymnasium_robotics", "fetch")}  # and vlmrm's extra


def simulator_named(name: str) -> Simulator:
    """A simulator of the table, registered with Gymnasium.

    Raises:
        ConfigError: when there is none of that name, or its package is not installed.
    """
    if name not in SIMULATORS:
        raise ConfigError(f"there is no simulator {name!r}: choose from {', '.join(SIMULATORS)}.")
    for prefix, (package, extra) in PACKAGES.items():
        if name.startswith(prefix):
            try:
                gym.register_envs(__import__(package))
            except ImportError as error:
                raise ConfigError(
                    f"{name} needs the package {package}: pip install -e '.[{extra}]' in vlmrm's folder."
                ) from error
    return SIMULATORS[name]
