"""The frames of two folders: their index, the split, the batches, and what is said of folders that do not do."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from robot_worlds.squares import SIDE, square_trajectory, write_squares
from torch.utils.data import DataLoader

from vlmrm.errors import DataError
from vlmrm_robots.frames.dataset import index_frames, split
from vlmrm_robots.trajectories.trajectory import (
    open_trajectory,
    trajectory_paths,
    write_trajectory,
)

SIZE = (3, SIDE, SIDE)


def index_of(root, keys=("base_camera",), size=SIZE):
    return index_frames(root / "positive", root / "negative", keys, size)


def test_every_frame_is_indexed_with_its_own_label(tmp_path):
    index, summary = index_of(write_squares(tmp_path, keys=("front", "wrist")), keys=("wrist", "front"))
    assert len(index) == 12 * 10 and index.labels.sum() == 8 * 5
    assert index.environment == "Squares"
    assert "8 trajectories, 80 frames, 40 of them successes" in summary
    assert "4 trajectories, 40 frames, 0 of them successes" in summary
    number = 0
    for folder in ("positive", "negative"):
        for path in trajectory_paths(tmp_path / folder):
            file = open_trajectory(path)
            for step in range(len(file)):
                images = index.images([number])
                assert list(images) == ["wrist", "front"]
                assert all(np.array_equal(images[key][0], file.frame(key, step)) for key in images)
                assert index.labels[number] == file.labels[step]
                number += 1


def test_the_split_is_by_trajectory_and_by_seed(tmp_path):
    index, _ = index_of(write_squares(tmp_path, positive=10, negative=5))
    training, validation = split(index, 0.2, seed=0)
    assert sorted([*training, *validation]) == list(range(len(index)))
    assert not set(index.owners[training]) & set(index.owners[validation])
    held_out = np.unique(index.owners[validation])
    assert (sum(held_out < 10), sum(held_out >= 10)) == (2, 1)  # of the positive ones, of the others
    again = split(index, 0.2, seed=0)
    assert np.array_equal(again[0], training) and np.array_equal(again[1], validation)
    splits = {tuple(np.unique(index.owners[split(index, 0.2, seed)[1]])) for seed in range(8)}
    assert len(splits) > 4


def test_twins_never_straddle_the_split_and_are_named(tmp_path):
    """Two collectors of one seed have stored every episode twice."""
    write_squares(tmp_path, positive=6, negative=2)
    for folder in (tmp_path / "positive", tmp_path / "negative"):
        for path in trajectory_paths(folder):
            shutil.copy(path, folder / f"1{path.name}")
    index, summary = index_of(tmp_path)
    for seed in range(4):
        training, validation = (
            {frame.numpy().tobytes() for frame in index.images(side)["base_camera"]}
            for side in split(index, 0.3, seed=seed)
        )
        assert training and validation and not training & validation
    assert len(index) == 8 * 10 and index.labels.sum() == 6 * 5
    assert "12 trajectories, 120 frames, 60 of them successes" in summary  # what lies there
    first = trajectory_paths(tmp_path / "positive")[0].name
    assert f"8 trajectories repeat others frame for frame and are left out (1{first}, " in summary


def test_one_trajectory_with_a_success_is_too_few(tmp_path):
    index, _ = index_of(write_squares(tmp_path, positive=1))
    with pytest.raises(DataError, match=r"1 of 5 trajectories have a success.*validation frames without successes"):
        split(index, 0.2, seed=0)


def test_a_batch_keeps_frames_and_labels_in_order(tmp_path):
    index, _ = index_of(write_squares(tmp_path))
    numbers = np.random.default_rng(0).permutation(np.arange(3, 40))

    [batch] = DataLoader(index, batch_size=None, sampler=[numbers.tolist()], num_workers=2)

    assert torch.equal(batch["base_camera"], index.images(numbers)["base_camera"])
    assert np.array_equal(batch["labels"], index.labels[numbers])


# Folders that do not do ----------------------------------------------------------------------------------------------


def test_missing_successes_or_failures_are_named_with_counts(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("positive", "negative"):
        for _ in range(2):
            write_trajectory(tmp_path / name, square_trajectory(generator, 0))
    with pytest.raises(DataError, match=r"no frame is a success.*positive: 2 trajectories, 20 frames, 0 of them"):
        index_of(tmp_path)
    elsewhere = tmp_path / "other"
    for name in ("positive", "negative"):
        write_trajectory(elsewhere / name, square_trajectory(generator, 10))
    with pytest.raises(DataError, match="no frame is a failure"):
        index_of(elsewhere)


def test_a_folder_without_trajectories_is_named(tmp_path):
    write_squares(tmp_path, negative=0)
    with pytest.raises(DataError, match=r"there is no folder .*negative"):
        index_of(tmp_path)
    (tmp_path / "negative").mkdir()
    shutil.rmtree(tmp_path / "positive")
    (tmp_path / "positive").mkdir()
    with pytest.raises(DataError, match=r"no trajectory in .*positive"):
        index_of(tmp_path)


def test_other_cameras_and_sizes_are_counted(tmp_path):
    write_squares(tmp_path)
    for _ in range(2):
        write_trajectory(tmp_path / "negative", square_trajectory(np.random.default_rng(1), 0, keys=("wrist",)))
    with pytest.raises(DataError, match=r"2 of 6 trajectories in .*negative have no images base_camera.*has wrist"):
        index_of(tmp_path)
    with pytest.raises(DataError, match=r"8 of 8 trajectories in .*another size than \[3, 64, 64\].*\[3, 32, 32\]"):
        index_of(tmp_path, size=(3, 64, 64))
