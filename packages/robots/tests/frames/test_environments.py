"""Simulators show frames of the state that they are in, say truly whether it is a success, and can be solved."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from vlmrm.errors import ConfigError
from vlmrm_robots.frames.environments import LabelledEnv, make_environments
from vlmrm_robots.frames.simulators import SIMULATORS

LOCAL = [*SIMULATORS]


def image(info: dict, key: str = "base_camera") -> np.ndarray:
    return info["images"][key]


@pytest.mark.parametrize("name", LOCAL)
def test_the_scripted_policy_solves_it_and_an_episode_ends_there(name):
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
def test_episodes_go_on_after_a_success_where_they_should(name):
    env = make_environments(name, 1, seed=0, max_steps=150, stop_at_success=False)
    policy = SIMULATORS[name].policy
    observations, _ = env.reset()
    successes = []
    while len(successes) < 150:
        observations, _, terminations, truncations, info = env.step(policy(observations))
        assert not terminations.any()
        successes.append((info["final_info"] if truncations.any() else info)["success"])
        if truncations.any():
            break
    assert sum(successes) > 1 and (len(successes) == 150 or name.startswith("MiniGrid"))


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
def test_an_episode_ends_at_a_success_at_which_the_simulator_goes_on(stop):
    env = LabelledEnv(Endless(), lambda env: env.unwrapped.t >= 2, stop_at_success=stop)
    assert env.reset()[1] == {"success": False}
    ends = [env.step(0) for _ in range(3)]
    assert [info["success"] for *_, info in ends] == [False, True, True]
    assert [terminated for _, _, terminated, _, _ in ends] == [False, stop, stop]


def test_an_action_is_repeated_until_the_task_is_done():
    env = LabelledEnv(Endless(), lambda env: env.unwrapped.t == 6, stop_at_success=False, action_repeat=4)
    env.reset()
    assert [env.step(0)[:2] for _ in range(3)] == [(4, 4.0), (6, 2.0), (10, 4.0)]


def test_equal_seeds_make_equal_episodes_and_environments_differ():
    first, again, different = (make_environments("Acrobot-v1", 2, seed=seed) for seed in (3, 3, 4))
    states = [env.reset()[0] for env in (first, again, different)]
    assert (states[0] == states[1]).all() and (states[0][1] == states[2][0]).all()
    assert (states[0][0] != states[0][1]).any()
    assert (first.reset()[0] != states[0]).any()  # only the first reset is the seed's


@pytest.mark.parametrize("name", ["Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"])
def test_states_are_scaled_for_networks(name):
    env = make_environments(name, 1, seed=0, keys=(), stop_at_success=False)
    space = env.single_observation_space
    assert (space.low == -1).all() and (space.high == 1).all()
    observations, _ = env.reset()
    fastest = np.zeros(observations.shape[1])
    for _ in range(150):
        fastest = np.maximum(fastest, np.abs(observations[0]))
        observations, *_ = env.step(SIMULATORS[name].policy(observations))
    assert fastest[-1] > 0.2 and fastest.max() <= 1


@pytest.mark.parametrize("size", [(1, 32, 48), (3, 40, 40)])
def test_frames_have_the_size_and_the_key_that_were_asked_for(size):
    env = make_environments("MountainCar-v0", 1, seed=0, image_size=size, keys=("wrist",))
    _, info = env.reset()
    assert image(info, "wrist").shape == (1, *size)
    assert image(info, "wrist").min() < 100 < image(info, "wrist").max()


def test_every_way_to_start_an_episode_can_be_had():
    for mode in AutoresetMode:
        env = make_environments("FrozenLake-v1", 1, seed=0, autoreset_mode=mode)
        assert env.metadata["autoreset_mode"] is mode


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Acrobat-v1", {}, "no simulator 'Acrobat-v1': did you mean Acrobot-v1"),
        ("Acrobot-v1", {"image_size": (64, 64, 3)}, r"image_size is \[64, 64, 3\]: it is \[C,H,W\]"),
        ("Acrobot-v1", {"keys": ("a", "b")}, "has one camera, and 2 image keys were given"),
    ],
)
def test_what_cannot_be_made_is_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_environments(name, **{"count": 1, "seed": 0, **options})
