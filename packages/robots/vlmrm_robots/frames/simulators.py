"""Simulators with a scripted policy, and the true success of every one of their states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np


@dataclass(frozen=True)
class Simulator:
    """A simulator's task: when a state is a success (else settings declare it), and a policy that solves it.

    `options` are keywords of `gymnasium.make`; `prepare` turns observations into plain states, and draws small, for
    frames of a side, if that is quicker.
    """

    success: Callable[[gym.Env], bool] | None = None
    policy: Callable[[np.ndarray], np.ndarray] | None = None
    prepare: Callable[[gym.Env, int], gym.Env] = lambda env, side: env
    options: Mapping[str, Any] = field(default_factory=dict)


def _scaled(env: gym.Env, side: int) -> gym.Env:
    """Scale the state to [-1, 1] for networks: a car's velocity is at most 0.07, an arm's 28."""
    return gym.wrappers.RescaleObservation(env, np.float32(-1), np.float32(1))


def _along(velocity: np.ndarray) -> np.ndarray:
    """Push along a velocity of the state, which always adds energy: action 2 forwards, 0 backwards."""
    return np.where(velocity >= 0, 2, 0)


def _prepare_acrobot(env: Any, side: int) -> gym.Env:
    # Acrobot draws on a square of any size: twice the frame's is quick, and scales down smoothly.
    env.unwrapped.SCREEN_DIM = 2 * side
    return _scaled(env, side)


def _acrobot_success(env: Any) -> bool:
    """Return whether the tip is above the line."""
    first, second = env.unwrapped.state[:2]
    return bool(-np.cos(first) - np.cos(first + second) > 1.0)


def _car_success(env: Any) -> bool:
    """Return whether the car is at the flag, in whichever direction it moves: a frame shows no velocities."""
    return bool(env.unwrapped.state[0] >= env.unwrapped.goal_position)


# Around the holes of the 4x4 map that does not slip, by the elf's place: left 0, down 1, right 2, up 3.
LAKE = np.array([1, 2, 1, 0, 1, 1, 1, 0, 2, 1, 1, 0, 1, 2, 2, 0])


SIMULATORS = {
    "Acrobot-v1": Simulator(_acrobot_success, lambda states: _along(states[:, 5]), _prepare_acrobot),
    "MountainCar-v0": Simulator(_car_success, lambda states: _along(states[:, 1]), _scaled),
    "MountainCarContinuous-v0": Simulator(
        _car_success, lambda states: (_along(states[:, 1:2]) - 1).astype(np.float32), _scaled
    ),
    "FrozenLake-v1": Simulator(
        lambda env: bool(env.unwrapped.desc.flat[env.unwrapped.s] == b"G"),  # ty: ignore[missing-attribute]
        lambda places: LAKE[places],
        options={"is_slippery": False},
    ),
}
