"""The example frames_policy.py: the truth beside each reward, and a policy of a few steps from each source."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from robot_worlds.played import Played
from robot_worlds.squares import small_classifier, small_config

from vlmrm_robots.frames.checkpoint import save_classifier
from vlmrm_robots.frames.frame_reward import FrameReward
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.trajectories.trajectory import open_folder

FILE = Path(__file__).parents[2] / "examples" / "frames_policy.py"
spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
assert spec and spec.loader
example = sys.modules[FILE.stem] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


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


def test_rewards_are_counted_against_the_truth_of_the_reached_state():
    """One is rewarded wrongly at its first step and rightly at its last, the other not at all where it should be."""
    episodes = (([200, 10, 250], [False, False, True]), ([10, 100, 20], [False, True, False]))
    makers = [lambda episode=episode: Told(*episode) for episode in episodes]
    true = example.TrueSuccess(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))
    audit = example.RewardAudit(FrameReward(true, RewardModelSettings(env_reward_weight=10), Brightness()))
    audit.reset()
    rewards = [audit.step(np.zeros(2, dtype=np.int64))[1].tolist() for _ in range(6)]
    assert rewards == [[1, 0], [0, 10], [11, 0]] * 2
    assert audit.counts == {"rewarded": 4, "false": 2, "missed": 2}


def test_it_trains_from_each_source_and_stores_the_policy_s_episodes(tmp_path, capsys):
    model = small_classifier(image_size=(3, 16, 16))
    save_classifier(tmp_path / "model", model, model.spec)
    words = ["--env", "MountainCarContinuous-v0", "--steps", "48", "--num-envs", "2", "--max-steps", "40"]
    words += ["--source", "success", "learned", "--episodes", "2", "--episodes-dir", str(tmp_path / "episodes")]
    example.main([str(tmp_path / "model"), *words])
    assert "| learned | 0 | 0% | 0% |" in capsys.readouterr().out  # nobody gets to the flag in 40 steps
    assert [len(file) for file in open_folder(tmp_path / "episodes/learned-seed0/negative")] == [11, 11]
