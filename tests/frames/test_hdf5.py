"""Episodes of robomimic and LIBERO are read from their HDF5, and what holds none is named."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from vlmrm.errors import ConfigError, DataError
from vlmrm.frames.importing import import_episodes
from vlmrm.frames.sources import episodes_in
from vlmrm.frames.trajectory import open_folder

PICTURES = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)


def test_reading_without_h5py_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "demo.hdf5").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"demo\.hdf5 needs h5py: pip install h5py"):
        episodes_in(None, None, tmp_path)


def written(path, rewards=(0, 0, 0, 1, 1), **observations):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for demo in ("demo_10", "demo_2"):
            group = file.create_group(f"data/{demo}")
            group["rewards"] = np.array(rewards, dtype=float) * (demo == "demo_2")
            for key, values in (observations or {"agentview_image": PICTURES, "ee_pos": np.zeros((5, 3))}).items():
                group[f"obs/{key}"] = values
    return path


def test_episodes_are_read_with_their_cameras_and_rewards(tmp_path):
    path = written(tmp_path / "demo.hdf5")
    folders = tmp_path / "positive", tmp_path / "negative"
    actual = import_episodes(episodes_in(None, None, path), *folders, "Lift")
    assert (len(actual.positive), len(actual.negative)) == (1, 1)
    [file] = open_folder(folders[0])
    assert file.keys == ["agentview_image"] and file.labels.tolist() == [0, 0, 0, 1, 1]
    assert (file.frames("agentview_image") == PICTURES.transpose(0, 3, 1, 2)).all()
    assert import_episodes(episodes_in(None, None, path), *folders, "Lift").earlier == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"ee_pos": np.zeros((5, 3))}, "has no pictures, but ee_pos"),
        ({"rewards": (0, 0, 0, 0.5, 1)}, "neither 0 nor 1"),
    ],
)
def test_an_episode_without_pictures_or_success_is_named(tmp_path, content, reason):
    path = written(tmp_path / "demo.hdf5", **content)
    with pytest.raises(DataError, match=reason):
        import_episodes(episodes_in(None, None, path), tmp_path / "positive", tmp_path / "negative", "Lift")


def test_a_set_that_was_never_written_takes_no_memory(tmp_path):
    path = written(tmp_path / "demo.hdf5")
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "a") as file:
        file["data/demo_2/obs"].create_dataset("wrist_image", (5, 1 << 20, 1 << 20, 3), dtype="u1", chunks=True)
    with pytest.raises(DataError, match="that the file does not store"):
        import_episodes(episodes_in(None, None, path), tmp_path / "positive", tmp_path / "negative", "Lift")


def test_a_file_that_is_no_hdf5_is_named(tmp_path):
    pytest.importorskip("h5py")
    (tmp_path / "demo.hdf5").write_bytes(b"no such thing")
    with pytest.raises(DataError, match=r"demo\.hdf5 cannot be read as HDF5"):
        episodes_in(None, None, tmp_path / "demo.hdf5")
