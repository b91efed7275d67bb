"""The audit of learned rewards, on environments whose frame is as bright as the classifier is sure."""

from __future__ import annotations

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from robot_worlds.played import Played
from robot_worlds.squares import small_config

from vlmrm_robots.frames.frame_reward import FrameReward
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.policies.environments import Counts, RewardAudit, TrueSuccess


class Told(Played):
    """After step t its frame has brightness[t] and is a success where success[t]."""

    reward = -1.0

    def __init__(self, brightness: list[int], success: list[bool]):
        super().__init__([0, *brightness])
        self.success = [False, *success]

    def shown(self):
        info = {"images": self.images, "success": self.success[self.t]}
        return np.array([self.t], dtype=np.float32), info


class Brightness:
    """A fake classifier: its probability is the frame's brightness."""

    config = small_config(image_size=(3, 2, 2), threshold=0.5)
    path = "the brightness"

    def probabilities(self, images):
        """The brightness of the first pixel."""
        return images["base_camera"][:, 0, 0, 0] / 255


def told(*episodes: tuple[list[int], list[bool]]) -> SyncVectorEnv:
    makers = [lambda episode=episode: Told(*episode) for episode in episodes]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def audit_of(*episodes, steps: int, **settings) -> RewardAudit:
    env = FrameReward(TrueSuccess(told(*episodes)), RewardModelSettings(**settings), Brightness())
    audit = RewardAudit(env)
    audit.reset()
    for _ in range(steps):
        audit.step(np.zeros(len(episodes), dtype=np.int64))
    return audit


FOOLED = ([200, 10, 250], [False, False, True])  # rewarded wrongly at its first step, rightly at its last
MISSED = ([10, 100, 20], [False, True, False])


def test_true_success_belongs_to_the_reached_state():
    env = TrueSuccess(told(FOOLED, MISSED))
    env.reset()
    rewards = [env.step(np.zeros(2, dtype=np.int64))[1].tolist() for _ in range(6)]
    assert rewards == [[0, 0], [0, 1], [1, 0]] * 2


def test_rewards_are_counted_against_true_success():
    audit = audit_of(FOOLED, MISSED, steps=6)
    counts = Counts(training_steps=12, true_successes=4, rewarded=4, false_positives=2, missed=2)
    assert audit.counts() == counts
    assert audit.counts() == Counts()


def test_continuous_rewards_count_above_the_threshold():
    continuous = audit_of(FOOLED, MISSED, steps=3, reward_type="continuous").counts()
    assert (continuous.rewarded, continuous.false_positives, continuous.missed) == (2, 1, 1)


def test_terminal_rewards_count_where_they_are_given():
    terminal = audit_of(FOOLED, MISSED, steps=3, reward_mode="terminal").counts()
    assert (terminal.rewarded, terminal.false_positives, terminal.missed) == (1, 0, 1)


def test_the_policy_s_rewards_stay_as_they_are():
    env = FrameReward(TrueSuccess(told(FOOLED)), RewardModelSettings(env_reward_weight=10), Brightness())
    audit = RewardAudit(env)
    audit.reset()
    assert [audit.step([0])[1].item() for _ in range(3)] == [1, 0, 11]
