"""WindowReward on environments whose picture says how far they are, with rewards that read the frames off."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from robot_worlds.played import Played

from vlmrm.errors import ConfigError, RewardError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards import PointwiseRewardModel, RewardModelOutput, RewardSet, register_reward_model
from vlmrm_robots.frames.window_reward import WindowReward

ROUNDS: list[list[list[int]]] = []  # the windows of each call, as the brightness of their frames


class Shown(Played):
    reward = 10.0

    def shown(self):
        return np.zeros(1, dtype=np.float32), {"images": self.images}


@register_reward_model("test_brightest")
class Brightest(PointwiseRewardModel):
    """The brightness of a window's last frame; one of 13 cannot be judged."""

    required_fields = ("prompt",)
    message_responses = True

    def __call__(self, prompt, image=None, response=None):
        images, responses = image or [None] * len(prompt), response or [None] * len(prompt)
        windows = []
        for one, several in zip(images, responses, strict=True):
            shown = [one] if one is not None else [it.reference for it in read_messages(several, "assistant")[0].media]
            windows.append([np.asarray(it)[0, 0, 0].item() for it in shown])
        ROUNDS.append(windows)
        failures = {number: "it is 13" for number, window in enumerate(windows) if window[-1] == 13}
        return RewardModelOutput([float(window[-1]) for window in windows], failures=failures)


def wrapped(*brightness, mode=AutoresetMode.SAME_STEP, settings=(), **options) -> WindowReward:
    ROUNDS.clear()
    envs = SyncVectorEnv([lambda levels=levels: Shown(levels) for levels in brightness], autoreset_mode=mode)
    reward = {"name": "brightest", "reward_model": "test_brightest", "device": "cpu", **dict(settings)}
    return WindowReward(envs, RewardSet([reward]), task="Shine.", image_key="base_camera", **options)


def rewards(env: WindowReward, steps: int) -> list[list[float]]:
    env.reset(seed=0)
    return np.array([env.step(np.zeros(env.num_envs, dtype=np.int64))[1] for _ in range(steps)]).T.tolist()


def test_windows_are_the_last_frames_judged_every_few_steps_and_at_the_end():
    env = wrapped([0, 1, 2, 3, 4, 5], window=3, every=2)

    assert rewards(env, 5) == [[0, 2, 0, 4, 5]]
    assert ROUNDS == [[[0, 1, 2]], [[2, 3, 4]], [[3, 4, 5]]]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_a_window_never_shows_the_episode_before(mode):
    env = wrapped([0, 1, 2], [5, 6, 7, 8], mode=mode, window=9, every=9)

    rewards(env, 4)

    expected = {AutoresetMode.SAME_STEP: [[0, 1, 2]], AutoresetMode.NEXT_STEP: []}[mode]
    assert [[[0, 1, 2]], [[5, 6, 7, 8]], *([expected] if expected else [])] == ROUNDS


def test_shaping_adds_up_to_nothing_over_an_episode():
    env = wrapped([0, 3, 9, 4, 6], window=2, every=2, shaping=0.9)

    [given] = rewards(env, 4)

    assert given == pytest.approx([0, 0.9 * 9, 0.9 * 9 - 9, -9])
    assert sum(0.9**step * reward for step, reward in enumerate(given)) == pytest.approx(0)


def test_a_failed_window_stops_or_has_the_declared_reward():
    with pytest.raises(RewardError, match="it is 13"):
        rewards(wrapped([0, 13, 5], every=1), 2)

    kept = wrapped([0, 13, 5], every=1, settings={"on_failure": "fallback", "fallback_reward": -1.0})
    assert rewards(kept, 2) == [[-1, 5]]

    with pytest.raises(ConfigError, match="masks failures"):
        wrapped([0, 1], settings={"on_failure": "mask"})


def test_all_windows_of_a_step_are_one_round():
    env = wrapped([0, 1, 2, 3], [7, 8, 9, 9], every=1, env_reward_weight=0.5)

    assert rewards(env, 2) == [[6, 7], [13, 14]]
    assert [len(windows) for windows in ROUNDS] == [2, 2]
