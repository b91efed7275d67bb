"""Simulators show frames of the state that they are in, say truly whether it is a success, and can be solved."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from vlmrm_robots.frames.environments import LabelledEnv, make_environments
from vlmrm_robots.frames.simulators import SIMULATORS

LOCAL = [*SIMULATORS]


def image(info: dict, key: str = "base_camera") -> np.ndarray:
    return info["images"][key]


@pytest.mark.parametrize("name", LOCAL)
def test_the_scripted_policy_solves_and_ends_the_episode(name):
    env, policy = make_environments(name, 2, seed=0, max_steps=300), SIMULATORS[name].policy
    observations, info = env.reset()
    assert not info["success"].any() and image(info).shape == (2, 3, 64, 64) and image(info).dtype == np.uint8
    solved = np.zeros(2, dtype=bool)
    while not solved.all():
        observations, _, terminations, truncations, info = env.step(policy(observations))
        assert not truncations.any()
        assert not info["success"].any()  # of the state that the observation tells of: a reset follows at once
        if terminations.any():
            assert info["final_info"]["success"][terminations].all()
            assert (image(info["final_info"])[terminations] != image(info)[terminations]).any()
        solved |= terminations


@pytest.mark.parametrize("name", LOCAL)
def test_episodes_may_go_on_after_success(name):
    env = make_environments(name, 1, seed=0, max_steps=150, stop_at_success=False)
    policy = SIMULATORS[name].policy
    observations, _ = env.reset()
    successes = []
    while len(successes) < 150:
        observations, _, terminations, truncations, info = env.step(policy(observations))
        assert not terminations.any()
        successes.append((info["final_info"] if truncations.any() else info)["success"])
    assert sum(successes) > 1 and len(successes) == 150


@pytest.mark.parametrize(
    ("name", "state", "success"),
    [
        ("Acrobot-v1", [np.pi, 0.0, 0, 0], True),
        ("Acrobot-v1", [np.pi / 2 + 0.6, 0.0, 0, 0], True),
        ("Acrobot-v1", [np.pi / 2 + 0.5, 0.0, 0, 0], False),
        ("Acrobot-v1", [np.pi, np.pi, 0, 0], False),
        ("MountainCar-v0", [0.5, -0.01], True),
        ("MountainCar-v0", [0.49, 0.07], False),
        ("MountainCarContinuous-v0", [0.45, 0], True),
        ("MountainCarContinuous-v0", [0.44, 0], False),
    ],
)
def test_success_is_what_the_state_says(name, state, success):
    env = make_environments(name, 1, seed=0)
    env.reset()
    inner = env.envs[0]
    inner.unwrapped.state = np.array(state, dtype=np.float64)
    assert SIMULATORS[name].success(inner) is success


class Endless(gym.Env):
    """Counts its steps and never ends by itself, as the arms of gymnasium-robotics do."""

    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t, 1.0, False, False, {}


@pytest.mark.parametrize("stop", [True, False])
def test_an_episode_ends_at_success_if_asked(stop):
    env = LabelledEnv(Endless(), lambda env: env.unwrapped.t >= 2, stop_at_success=stop)
    assert env.reset()[1] == {"success": False}
    ends = [env.step(0) for _ in range(3)]
    assert [info["success"] for *_, info in ends] == [False, True, True]
    assert [terminated for _, _, terminated, _, _ in ends] == [False, stop, stop]


def test_an_action_repeats_until_the_task_is_done():
    env = LabelledEnv(Endless(), lambda env: env.unwrapped.t == 6, stop_at_success=False, action_repeat=4)
    env.reset()
    assert [env.step(0)[:2] for _ in range(3)] == [(4, 4.0), (6, 2.0), (10, 4.0)]
