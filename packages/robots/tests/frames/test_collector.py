"""Collected frames have the labels of the states that they show, each whole episode is one file, and none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from robot_worlds.counting import counting, picture, told

from vlmrm.errors import ConfigError, DataError
from vlmrm_robots.frames.collector import RewardDataCollector
from vlmrm_robots.trajectories.trajectory import open_folder, open_trajectory, trajectory_paths


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    return tmp_path / "positive", tmp_path / "negative"


@pytest.fixture
def collect(folders):
    """Makes collectors into the folders, and closes them all."""
    made: list[RewardDataCollector] = []

    def make(env: VectorEnv, *settings: Any, **more: Any) -> RewardDataCollector:
        made.append(RewardDataCollector(env, *folders, *(settings or [["cam"]]), **more))
        return made[-1]

    yield make
    for collector in made:
        collector.close()


def stories(folder: Path, key: str = "cam") -> dict[tuple[int, int], list[int]]:
    """By environment and episode the steps of the trajectories; each frame's label is asserted to be its own."""
    stored: dict[tuple[int, int], list[int]] = {}
    for file in open_folder(folder):
        frames = [told(file.frame(key, t)) for t in range(len(file))]
        assert [success for *_, success in frames] == list(file.labels >= 0.5)
        [(number, episode)] = {(number, episode) for number, episode, *_ in frames}
        assert (number, episode) not in stored
        stored[number, episode] = [step for _, _, step, _ in frames]
    return stored


def play(env: VectorEnv, steps: int, seed: int | None = 7) -> None:
    """Steps that reset each environment after its end where it does not do so itself."""
    env.reset(seed=seed)
    for _ in range(steps):
        _, _, terminations, truncations, _ = env.step(np.zeros(env.num_envs, dtype=int))
        ended = terminations | truncations
        if env.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            env.reset(options={"reset_mask": ended})


# Frames and labels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("where", ["info", "observation"])
def test_each_episode_is_one_file_from_its_reset(folders, collect, mode, where):
    with_end = collect(counting(3, mode, where=where))
    play(with_end, 12)
    with_end.close()
    stored = stories(folders[0]) | stories(folders[1])
    complete = {story: steps for story, steps in stored.items() if len(steps) == 4 + story[0]}
    assert {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)} <= complete.keys()
    assert all(steps == list(range(len(steps))) for steps in stored.values())
    assert all(number % 2 == 0 for number, _ in stories(folders[0]))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_unlabelled_reset_is_left_out_without_shifting(folders, collect, mode):
    collector = collect(counting(2, mode, label_resets=False))
    play(collector, 9)
    collector.close()
    stored = stories(folders[0]) | stories(folders[1])
    assert {(0, 0): [1, 2, 3], (0, 1): [1, 2, 3], (1, 0): [1, 2, 3, 4]}.items() <= stored.items()


class Chunked(VectorEnv):
    """Takes three steps at once, of two environments whose episodes end at their fourth, within a chunk."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 2

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.clock = 0
        return np.zeros(2), {}

    def step(self, actions: Any) -> Any:
        times = np.arange(self.clock, self.clock + 3)
        self.clock += 3
        ends = times % 4 == 3
        images = [[picture(number, t // 4, t % 4, t % 4 == 3) for t in times] for number in range(2)]
        labels = np.tile(ends, (2, 1))
        info = {"images": {"cam": np.array(images)}, "success": labels}
        return np.zeros(2), np.zeros((2, 3)), np.tile(ends, (2, 1)), np.zeros((2, 3), dtype=bool), info


def test_a_chunk_is_cut_where_an_episode_ends(folders, collect):
    collector = collect(Chunked())
    collector.reset()
    for _ in range(3):
        collector.step(None)
    collector.close()
    assert stories(folders[0]) == {(n, e): [0, 1, 2, 3] for n in range(2) for e in range(2)}
    assert trajectory_paths(folders[1]) == []  # the third episodes have only begun


class SuccessOnce(gym.vector.VectorWrapper):
    """Says at the end of environment 1's episodes, and of no other's, that it succeeded though no frame shows it."""

    def step(self, actions: Any) -> Any:
        *result, info = self.env.step(actions)
        if "final_info" in info:
            info["final_info"] |= {"success_once": np.array([False, True])}
        return *result, info


def test_success_once_makes_that_environment_s_trajectory_positive(folders, collect):
    collector = collect(SuccessOnce(counting(2)))
    play(collector, 8)
    collector.close()
    assert {(1, 0), (1, 1)} <= stories(folders[0]).keys()
    about = {file.metadata["success_once"] for file in open_folder(folders[0]) if file.labels.max() < 0.5}
    assert about == {"true"}


def test_metadata_says_where_a_trajectory_comes_from(folders, collect):
    collector = collect(counting(2, keys=("cam", "wrist")), ["wrist", "cam"], environment="Toy")
    play(collector, 8)
    collector.close()
    [second] = [file for file in open_folder(folders[1]) if told(file.frame("wrist", 0))[:2] == (1, 1)]
    assert second.keys == ["wrist", "cam"]
    assert second.metadata | {"keys": ""} == {
        "environment": "Toy", "seed": "8", "episode": "1", "success_once": "false", "ended": "true", "frames": "5",
        "successes": "0", "version": "1", "keys": "",
    }  # fmt: skip


def test_without_collect_data_nothing_is_touched(folders, collect):
    collector = collect(counting(1), ["no such camera"], collect_data=False)
    play(collector, 8)
    collector.close()
    assert not folders[0].exists() and not folders[1].exists()


# Limits, several processes, ends -------------------------------------------------------------------------------------


def test_limits_count_folder_contents_across_collectors(folders, collect):
    for seed, expected in enumerate((2, 3, 3)):
        limit = 3 if expected == 3 else 2
        collector = collect(counting(1), ["cam"], limit, 0)
        play(collector, 3 * 4, seed)
        assert collector.full is True
        collector.close()
        names = [path.name for path in trajectory_paths(folders[0])]
        assert [int(name[:6]) for name in names] == list(range(expected))
    assert trajectory_paths(folders[1]) == []


PROGRAM = """
import os, signal, sys, time
sys.path[:0] = {tests!r}
from test_collector import Doing, RewardDataCollector, counting, play
collector = RewardDataCollector({env}, {positive!r}, {negative!r}, ["cam"], {limit})
play(collector, {steps}, {seed})
{then}
"""


def start(folders, *, steps: int, then="", limit: int | None = None, seed=7, env="counting(3)") -> subprocess.Popen:
    tests = [str(folder) for folder in Path(__file__).parents[:2]]
    paths = {"positive": str(folders[0]), "negative": str(folders[1]), "tests": tests}
    program = PROGRAM.format(**paths, steps=steps, then=then, limit=limit, seed=seed, env=env)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, env=environment)


def ended(process: subprocess.Popen) -> int:
    _, stderr = process.communicate()
    assert b"Traceback" not in stderr, stderr.decode()
    return process.returncode


def test_processes_share_a_folder_within_its_limit(folders):
    processes = [start(folders, steps=120, limit=50, seed=seed) for seed in (100, 200)]
    assert [ended(process) for process in processes] == [0, 0]
    positive, negative = open_folder(folders[0]), open_folder(folders[1])
    assert len(positive) == 50  # of 2 * (40 + 24)
    assert len(negative) == 2 * 30  # environment 1's
    assert len({path.name[:6] for path in trajectory_paths(folders[0])}) == 50


@pytest.mark.parametrize(
    ("then", "status", "kept"),
    [("", 0, True), ("os.kill(os.getpid(), signal.SIGTERM)", 143, True), ("os.kill(os.getpid(), 9)", -9, False)],
)
def test_unfinished_successes_are_written_except_after_sigkill(folders, then, status, kept):
    assert ended(start(folders, steps=2, then=then, env="Doing(counting(3))")) == status
    assert [len(file) for file in map(open_trajectory, trajectory_paths(folders[0]))] == [3] * kept
    assert trajectory_paths(folders[1]) == []  # the others might still have succeeded


# What cannot be collected --------------------------------------------------------------------------------------------


class Doing(gym.vector.VectorWrapper):
    """Says that every state of environment 1 is a success."""

    def step(self, actions: Any) -> Any:
        *result, info = self.env.step(actions)
        info["success"][1] = True
        return *result, info


def test_a_missing_image_is_refused_by_name(collect):
    with pytest.raises(DataError, match="environment 0 shows no image 'wrist'"):
        play(collect(counting(1), ["cam", "wrist"]), 1)


class Changed(gym.vector.VectorWrapper):
    """Shows or says something else at each step."""

    def __init__(self, env: VectorEnv, change: Any):
        super().__init__(env)
        self.change = change

    def step(self, actions: Any) -> Any:
        *result, info = self.env.step(actions)
        self.change(info)
        return *result, info


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.pop("success"), "environment 0 does not say whether its state is a success"),
        (lambda info: info.update(success=np.array([1.5])), "says success 1.5: it is true, false, or from 0 to 1"),
        (lambda info: info["images"].update(cam=np.full((1, 3, 4, 4), 200.0)), r"48 of 48 values outside \[0, 1\]"),
        (lambda info: info["images"].update(cam=np.zeros((1, 9, 9, 2), np.uint8)), r"of shape \[9, 9, 2\]"),
        (
            lambda info: info["images"].update(cam=np.zeros((1, 3, 8, 8), np.uint8)),
            r"as \[3, 8, 8\] after \[3, 4, 4\]",
        ),
    ],
)
def test_what_is_no_labelled_frame_is_refused(collect, change, message):
    collector = collect(Changed(counting(1), change))
    with pytest.raises(DataError, match=message):
        play(collector, 2)


def test_one_folder_for_both_kinds_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="positive_dir and negative_dir are both"):
        RewardDataCollector(counting(1), tmp_path / "data", tmp_path / "other" / ".." / "data", ["cam"])


def test_an_environment_must_declare_its_autoreset_mode(collect):
    env = counting(1)
    env.metadata = {}
    with pytest.raises(ConfigError, match=r"set metadata\['autoreset_mode'\]"):
        collect(env)
