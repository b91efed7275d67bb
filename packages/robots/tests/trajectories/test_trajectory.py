"""A trajectory file is whole, is read frame by frame, and says what is wrong with it."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from vlmrm.errors import DataError
from vlmrm_robots.trajectories.trajectory import (
    Trajectory,
    find_trajectory,
    holds,
    open_folder,
    open_trajectory,
    to_uint8,
    to_unit,
    write_trajectory,
)


def frames(count: int, *, side: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def labels(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_what_was_written_is_read_frame_by_frame(tmp_path):
    images = {"wrist": frames(3), "base": frames(3, side=6)}
    path = write_trajectory(tmp_path / "new", Trajectory(images, labels(0, 0.25, 1), {"environment": "Toy"}))
    for file in (open_trajectory(path), pickle.loads(pickle.dumps(open_trajectory(path)))):
        assert file.keys == ["wrist", "base"] and file.shapes["base"] == (3, 6, 6) and len(file) == 3
        assert file.labels.tolist() == [0, 0.25, 1] and file.labels.dtype == np.float32
        assert all((file.frame(key, t) == images[key][t]).all() for key in images for t in range(3))
        assert (file.frames("wrist") == images["wrist"]).all()
        assert file.metadata["environment"] == "Toy" and file.metadata["successes"] == "1"
        with pytest.raises(DataError, match="has no images 'top': it has wrist, base"):
            file.frame("top", 0)
        with pytest.raises(IndexError):
            file.frame("wrist", 3)


@pytest.mark.parametrize(
    ("values", "success_once", "positive"),
    [((0, 0.49), "false", False), ((0, 0.5), "false", True), ((0, 0), "true", True), ((0, 0), "", False)],
)
def test_a_success_or_success_once_makes_it_positive(tmp_path, values, success_once, positive):
    trajectory = Trajectory({"cam": frames(2)}, labels(*values), {"success_once": success_once})
    assert trajectory.positive is positive
    assert open_trajectory(write_trajectory(tmp_path, trajectory)).metadata["success_once"] == success_once


def test_files_are_numbered_found_and_counted(tmp_path):
    def write(unique: str) -> str:
        return write_trajectory(tmp_path, Trajectory({"cam": frames(1)}, labels(1)), unique).name

    names = [write(unique) for unique in "abc"]

    assert names == ["000000_a.safetensors", "000001_b.safetensors", "000002_c.safetensors"]
    assert find_trajectory(tmp_path, "b") == tmp_path / names[1] and find_trajectory(tmp_path, "d") is None
    assert holds(tmp_path, 3) and not holds(tmp_path, 4)
    (tmp_path / names[1]).unlink()
    assert find_trajectory(tmp_path, "b") is None and holds(tmp_path, 2) and not holds(tmp_path, 3)
    assert find_trajectory(tmp_path / "nowhere", "a") is None


def test_floats_are_stored_to_the_nearest_byte():
    stored = to_uint8(np.array([0, 0.5, 1]), "these")
    assert stored.tolist() == [0, 128, 255] and stored.dtype == np.uint8
    assert to_unit(stored).tolist() == pytest.approx([0, 128 / 255, 1]) and to_unit(stored).dtype == np.float32


GOOD = {"images.cam": frames(2), "labels": labels(0, 1)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"labels": None}, {}, "has no labels, but images.cam"),
        ({"images.cam": None}, {}, "has no images"),
        ({"images.cam": frames(3)}, {}, "has 3 frames of 'cam' and 2 labels"),
        ({"labels": labels(0, 2)}, {}, r"has 1 of 2 labels outside \[0, 1\]"),
        ({"labels": labels()}, {}, r"has labels of shape \[0\]"),
        ({"labels": np.array([0, 1])}, {}, "has labels of int64"),
        ({"images.cam": np.zeros((2, 3, 4, 4), np.float32)}, {}, "has images of F32"),
        ({"images.cam": np.zeros((2, 4, 4, 3), np.uint8)}, {}, r"images 'cam' of shape \[2, 4, 4, 3\]"),
        ({}, {"keys": '["wrist"]'}, "says its images are wrist and has cam"),
        ({}, {"keys": "{"}, "its keys are '{'"),
        ({}, {"version": "2"}, "of version 2, and this program reads version 1"),
    ],
)
def test_what_is_no_trajectory_is_named(tmp_path, tensors, metadata, message):
    path = tmp_path / "000000_0badf11e.safetensors"
    content = {name: value for name, value in (GOOD | tensors).items() if value is not None}
    save_file(content, path, {"keys": json.dumps(["cam"])} | metadata if "images.cam" in content else {})
    with pytest.raises(DataError, match=message) as refused:
        open_trajectory(path)
    assert str(path) in str(refused.value)


def test_missing_files_and_empty_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no trajectory .*nowhere"):
        open_trajectory(tmp_path / "nowhere")
    with pytest.raises(DataError, match=f"there is no trajectory in {tmp_path}"):
        open_folder(tmp_path)
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        open_folder(tmp_path / "nowhere")
    write_trajectory(tmp_path / "positive", Trajectory({"cam": frames(1)}, labels(1)))
    with pytest.raises(DataError, match="but in its folders positive"):
        open_folder(tmp_path)
