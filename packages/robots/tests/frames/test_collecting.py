"""`vlmrm frames collect` plays the episodes that were asked for, once, the same each time, by flags or a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vlmrm import cli
from vlmrm.errors import ConfigError, DataError
from vlmrm.settings import validate
from vlmrm_robots.frames.collecting import collect, summarise
from vlmrm_robots.frames.collector import RewardDataCollector
from vlmrm_robots.frames.settings import CollectSettings
from vlmrm_robots.trajectories.trajectory import (
    open_folder,
    open_trajectory,
    trajectory_paths,
)

YAML = """
env: FrozenLake-v1
episodes: 3
reward:
  group_name: "RewardGroup"
  use_reward_model: False  # during collection
  collect_data: True
  reward_model:
    image_keys: ["base_camera"]
    image_size: [3, 16, 16]
  data_collection:
    positive_dir: "./reward_data/positive"
    negative_dir: "./reward_data/negative"
    image_keys: ["base_camera"]
    max_positive_trajectories: 500
    max_negative_trajectories: 500
"""


def settings(folder: Path, **changes) -> CollectSettings:
    collection = {"positive_dir": folder / "positive", "negative_dir": folder / "negative"} | changes.pop("limits", {})
    reward = {"collect_data": True, "data_collection": collection, "reward_model": {"image_size": (3, 16, 16)}}
    content = {"env": "FrozenLake-v1", "episodes": 9, "num_envs": 4, "max_steps": 20, "noise": 0.2, "reward": reward}
    return validate(CollectSettings, content | changes, "the test")


def contents(folder: Path) -> dict[str, tuple[bytes, list[float]]]:
    """By seed, the frames and labels of all trajectories below a folder."""
    files = [open_trajectory(path) for name in ("positive", "negative") for path in trajectory_paths(folder / name)]
    collected = {file.metadata["seed"]: (file.frames("base_camera").tobytes(), file.labels.tolist()) for file in files}
    assert len(collected) == len(files)
    return collected


@pytest.fixture
def run(capsys):
    """Runs the command and returns what it prints."""

    def collect_command(*words: object) -> str:
        cli.app(["frames", "collect", *map(str, words)], result_action="return_value", exit_on_error=False)
        return capsys.readouterr().out

    return collect_command


def test_the_requested_number_of_episodes_is_collected(tmp_path):
    collected = collect(settings(tmp_path))
    assert len(collected.positive) + len(collected.negative) == 9 == len(contents(tmp_path))
    assert collected.positive and collected.negative
    labels = [label for _, labels in contents(tmp_path).values() for label in labels]
    assert (collected.frames, collected.successes) == (len(labels), sum(labels))


def test_episodes_are_equal_however_many_run_in_parallel(tmp_path):
    for count in (1, 4):
        collect(settings(tmp_path / str(count), num_envs=count))
    assert contents(tmp_path / "1") == contents(tmp_path / "4")
    collect(settings(tmp_path / "other", seed=1))
    assert not contents(tmp_path / "1").keys() & contents(tmp_path / "other").keys()


def test_a_collection_goes_on_where_it_was(tmp_path):
    collect(settings(tmp_path / "whole"))
    assert collect(settings(tmp_path / "parts", episodes=4)).earlier == 0
    for path in trajectory_paths(tmp_path / "parts" / "positive")[:1]:
        path.unlink()  # as if the program had been killed before it
    collected = collect(settings(tmp_path / "parts"))
    assert collected.earlier == 3 and len(collected.positive) + len(collected.negative) == 6
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert collect(settings(tmp_path / "parts")).frames == 0


def test_an_interrupted_collection_resumes_with_whole_episodes(tmp_path, monkeypatch):
    collect(settings(tmp_path / "whole"))
    step, left = RewardDataCollector.step, iter(range(30))

    def interrupted(self, actions):
        if next(left, None) is None:
            raise SystemExit(143)
        return step(self, actions)

    monkeypatch.setattr(RewardDataCollector, "step", interrupted)
    with pytest.raises(SystemExit):
        collect(settings(tmp_path / "parts"))
    monkeypatch.undo()
    stored = contents(tmp_path / "parts")
    assert 0 < len(stored) < 9 and stored.items() <= contents(tmp_path / "whole").items()
    assert collect(settings(tmp_path / "parts")).earlier == len(stored)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_folders_with_other_sizes_or_cameras_are_refused(tmp_path):
    collect(settings(tmp_path))
    before = contents(tmp_path)
    for model, text in (
        ({"image_size": (3, 8, 8)}, "images base_camera of another size"),
        ({"image_keys": ["wrist"]}, "no images wrist"),
    ):
        reward = settings(tmp_path).reward.model_dump() | {"reward_model": {"image_size": (3, 16, 16)} | model}
        with pytest.raises(DataError, match=rf"(\d+) of \1 trajectories in .*positive have {text}"):
            collect(settings(tmp_path, episodes=10, reward=reward))
    assert contents(tmp_path) == before


def test_it_ends_when_both_folders_are_full(tmp_path):
    limits = {"max_positive_trajectories": 2, "max_negative_trajectories": 1}
    collected = collect(settings(tmp_path, episodes=500, limits=limits))
    assert (len(collected.positive), len(collected.negative)) == (2, 1)
    assert "both folders hold as many as they may" in summarise(collected)
    assert collect(settings(tmp_path, episodes=500, limits=limits)).frames == 0


def test_a_folder_has_labels_of_one_declared_success(tmp_path):
    collect(settings(tmp_path, episodes=2, success="reward >= 1"))
    with pytest.raises(ConfigError, match=r"success is reward >= 0.5, and .* was labelled by reward >= 1"):
        collect(settings(tmp_path, episodes=4, success="reward >= 0.5"))
    with pytest.raises(ConfigError, match="success is the simulator's"):
        collect(settings(tmp_path, episodes=4))


def test_another_environment_in_the_folders_is_warned_of(tmp_path, caplog):
    collect(settings(tmp_path, episodes=2))
    assert not caplog.messages
    collect(settings(tmp_path, episodes=2, env="MountainCar-v0", max_steps=1))
    assert f"{tmp_path / 'positive'} has episodes of FrozenLake-v1 too" in caplog.text


def test_a_demonstrator_who_never_succeeds_is_warned_of(tmp_path, caplog):
    collect(settings(tmp_path, episodes=2, max_steps=1, policy="random"))  # failures are wanted of it
    assert not caplog.messages
    collect(settings(tmp_path, episodes=2, max_steps=1))
    assert "no episode has a success so far: raise max_steps" in caplog.text
    caplog.clear()
    never = {"env": "CartPole-v1", "success": "reward > 9", "policy": "random"}  # a threshold that nothing reaches
    collect(settings(tmp_path / "cart", episodes=1, max_steps=1, **never))
    assert "or check success" in caplog.text


def test_the_documented_file_is_read_and_flags_win(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("collect.yaml").write_text(YAML)
    assert "positive and " in run("collect.yaml", "--noise", 0, "--max-steps", 15)
    files = open_folder(Path("reward_data/positive"))
    assert len(files) == 3 and files[0].shapes["base_camera"] == (3, 16, 16)
    words = ["--episodes", 1, "--seed", 5, "--stop-at-success", "--noise", 0, "--positive-dir", "other"]
    run("collect.yaml", *words)
    [file] = open_folder(Path("other"))
    assert file.labels.tolist() == [0] * 6 + [1]
    text = run("collect.yaml", "--noise", 0, "--max-steps", 15)
    assert "0 positive and 0 negative" in text and "3 episodes were collected before" in text


def test_flags_alone_are_enough(tmp_path, run):
    text = run(
        "--env", "FrozenLake-v1", "--episodes", 2, "--image-size", 1, 16, 16, "--image-keys", "top",
        "--positive-dir", tmp_path / "p", "--negative-dir", tmp_path / "n", "--num-envs", 1, "--policy", "scripted",
        "--max-positive-trajectories", 1, "--max-negative-trajectories", 7, "--max-steps", 20, "--noise", 0,
    )  # fmt: skip
    [file] = open_folder(tmp_path / "p")
    assert file.shapes["top"] == (1, 16, 16) and file.metadata["environment"] == "FrozenLake-v1"
    assert "1 positive and 0 negative trajectories" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"envs": "x"}, r"the test: unknown key envs \(did you mean env\?\)"),
        (
            {"reward": {"data_collection": {"positive_dirs": "x"}}},
            r"data_collection.positive_dirs \(did you mean positive",
        ),
        ({"noise": 2}, r"noise: Input should be less than or equal to 1 \(it is 2\)"),
        (
            {"reward": {"data_collection": {"image_keys": ["a"]}, "reward_model": {"image_keys": ["b"]}}},
            r"reward_model.image_keys is \['b'\] and data_collection.image_keys \['a'\]",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        validate(CollectSettings, {"env": "FrozenLake-v1"} | change, "the test")


def test_what_cannot_be_collected_is_named(tmp_path, run):
    with pytest.raises(ConfigError, match=r"reward\.collect_data is false"):
        collect(settings(tmp_path, reward={"collect_data": False}))
    with pytest.raises(ConfigError, match="give --env"):
        run("--episodes", 1)
    (tmp_path / "flat.yaml").write_text("env: FrozenLake-v1\nreward: 1")
    with pytest.raises(ConfigError, match="reward is 1: it is a block of keys"):
        run(tmp_path / "flat.yaml", "--positive-dir", tmp_path)
    collect(settings(tmp_path, episodes=1))
    [path] = [*(tmp_path / "positive").glob("*.safetensors"), *(tmp_path / "negative").glob("*.safetensors")]
    path.write_bytes(b"broken")
    with pytest.raises(DataError, match="is corrupted"):
        collect(settings(tmp_path, episodes=1))


def test_a_collection_stopped_by_sigterm_replays_nothing(tmp_path):
    folders = ["--positive-dir", tmp_path / "positive", "--negative-dir", tmp_path / "negative"]
    words = ["--env", "FrozenLake-v1", "--image-size", 3, 16, 16, "--episodes", 100_000, *folders]
    program = "from vlmrm.cli import main; main()"
    command = [sys.executable, "-c", program, "frames", "collect", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    began = time.monotonic()
    while not trajectory_paths(tmp_path / "positive") and process.poll() is None:
        assert time.monotonic() - began < 600
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate()
    assert process.returncode == 143 and b"Traceback" not in text, text.decode()
    before = contents(tmp_path)
    assert before
    collected = collect(settings(tmp_path, episodes=len(before) + 5, max_steps=200, noise=0.3))
    assert collected.earlier > 0 and contents(tmp_path).items() >= before.items()


def test_acrobot_s_frames_show_what_the_labels_say(tmp_path):
    """The tip is the highest thing drawn besides the line, and above it where the label says success."""
    collect(settings(tmp_path, env="Acrobot-v1", episodes=4, max_steps=200, reward={
        "collect_data": True,
        "data_collection": {"positive_dir": tmp_path / "positive", "negative_dir": tmp_path / "negative"},
    }))  # fmt: skip
    files = [open_trajectory(path) for path in trajectory_paths(tmp_path / "positive")]
    labels = np.concatenate([file.labels for file in files])
    frames = np.concatenate([file.frames("base_camera") for file in files]).astype(int)
    arm = frames[:, 2] - frames[:, 0] > 60  # cyan
    line = int(64 * (0.5 - 1 / 4.4))
    above = arm[:, :line].any(axis=(1, 2))
    assert labels.sum() > 20 and np.mean(above == (labels > 0)) > 0.97
