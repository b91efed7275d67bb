"""The frames of two folders: their index, the split, the batches, and what is said of folders that do not do."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import torch
from squares import SIDE, square_trajectory, write_squares
from torch.utils.data import DataLoader

from vlmrm.errors import ConfigError, DataError
from vlmrm_robots.frames.dataset import (
    FrameBatches,
    class_weights,
    index_frames,
    split,
)
from vlmrm_robots.trajectories.trajectory import (
    Trajectory,
    open_trajectory,
    trajectory_paths,
    write_trajectory,
)

SIZE = (3, SIDE, SIDE)


def index_of(root, keys=("base_camera",), size=SIZE):
    return index_frames(root / "positive", root / "negative", keys, size)


def test_every_frame_is_in_the_index_with_its_own_label(tmp_path):
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


def test_a_success_that_no_frame_shows_is_no_positive_frame(tmp_path):
    write_squares(tmp_path, positive=2)
    silent = square_trajectory(np.random.default_rng(1), 0)
    write_trajectory(tmp_path / "positive", Trajectory(silent.images, silent.labels, {"success_once": "true"}))
    index, _ = index_of(tmp_path)
    assert index.labels.sum() == 2 * 5


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


def test_twins_are_never_on_both_sides_and_are_named(tmp_path):
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


def test_equal_labels_make_no_twins(tmp_path):
    index, summary = index_of(write_squares(tmp_path, positive=3, negative=3))
    assert len(index) == 60 and "left out" not in summary


def test_a_small_share_still_holds_out_a_success(tmp_path):
    index, _ = index_of(write_squares(tmp_path, positive=3, negative=1))
    _, validation = split(index, 0.01, seed=0)
    assert index.labels[validation].any() and len(np.unique(index.owners[validation])) == 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_a_share_that_leaves_nothing_is_refused(tmp_path, fraction):
    index, _ = index_of(write_squares(tmp_path, positive=2, negative=1))
    with pytest.raises(ConfigError, match="val_fraction"):
        split(index, fraction, seed=0)


def test_one_trajectory_with_a_success_is_too_few(tmp_path):
    index, _ = index_of(write_squares(tmp_path, positive=1))
    with pytest.raises(DataError, match=r"1 of 5 trajectories have a success.*validation frames without successes"):
        split(index, 0.2, seed=0)


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_has_every_frame_with_its_label_in_the_order_of_its_sampler(tmp_path, workers):
    index, _ = index_of(write_squares(tmp_path))
    numbers = np.arange(3, 40)
    order = np.random.default_rng(0).permutation(len(numbers))
    loader = DataLoader(FrameBatches(index.images, index.labels, numbers[order], 16), None, num_workers=workers)
    for _ in range(2):
        batches = list(loader)
        assert [len(batch["labels"]) for batch in batches] == [16, 16, 5]
        pictures, labels = (torch.cat([batch[name] for batch in batches]) for name in ("base_camera", "labels"))
        assert torch.equal(pictures, index.images(numbers[order])["base_camera"])
        assert np.array_equal(labels, index.labels[numbers[order]])


def test_class_weights_make_classes_equal():
    labels = np.array([1, 0, 0, 0], dtype=np.float32)
    weights = class_weights(labels)[labels.astype(int)]
    assert weights[labels == 1].sum() == pytest.approx(weights[labels == 0].sum())
    assert weights.mean() == pytest.approx(1)


def test_an_index_can_be_sent_to_another_process(tmp_path):
    index, _ = index_of(write_squares(tmp_path, positive=2, negative=1))
    before = index.images([3])
    assert torch.equal(pickle.loads(pickle.dumps(index)).images([3])["base_camera"], before["base_camera"])


# Folders that do not do ----------------------------------------------------------------------------------------------


def test_no_success_or_no_failure_is_said_with_counts(tmp_path):
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


def test_corrupted_files_are_counted(tmp_path):
    write_squares(tmp_path)
    broken = trajectory_paths(tmp_path / "positive")[3]
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"1 of 8 files in .*positive cannot be used \({broken.name}\)"):
        index_of(tmp_path)
