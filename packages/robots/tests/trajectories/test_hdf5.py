"""Episodes of robomimic and LIBERO are read from their HDF5, and what holds none is named."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from vlmrm.errors import ConfigError, DataError
from vlmrm_robots.trajectories.importing import episodes_in, import_episodes
from vlmrm_robots.trajectories.trajectory import open_folder

PICTURES = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)


def test_reading_without_h5py_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "demo.hdf5").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"demo\.hdf5 needs h5py: pip install h5py"):
        episodes_in(None, None, tmp_path)


def written(path, rewards=(0, 0, 0, 1, 1), attributes=(), shown="next_obs", **observations):
    """Two demonstrations, of which demo_2 has these rewards and demo_10 none."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for demo in ("demo_10", "demo_2"):
            group = file.create_group(f"data/{demo}")
            group["rewards"] = np.array(rewards, dtype=float) * (demo == "demo_2")
            group["dones"] = np.arange(len(rewards)) == len(rewards) - 1
            for key, values in (observations or {"agentview_image": PICTURES, "ee_pos": np.zeros((5, 3))}).items():
                group[f"{shown}/{key}"] = values
                group.require_group("obs")
        file["data"].attrs.update(dict.fromkeys(attributes, "text"))
    return path


def frames_and_labels(episodes):
    [trajectory] = [episode.read() for episode in episodes if episode.name.endswith("demo_2")]
    [frames] = trajectory.images.values()
    return frames.transpose(0, 2, 3, 1), trajectory.labels.tolist(), trajectory


def test_robomimic_frames_have_the_reward_of_their_state(tmp_path):
    episodes = episodes_in(None, None, written(tmp_path / "demo.hdf5"))
    assert [episode.name for episode in episodes] == ["demo.hdf5 demo_2", "demo.hdf5 demo_10"]
    frames, labels, _ = frames_and_labels(episodes)
    assert (frames == PICTURES).all() and labels == [0, 0, 0, 1, 1]


def test_without_next_observations_frames_have_the_earlier_reward(tmp_path):
    episodes = episodes_in(None, None, written(tmp_path / "demo.hdf5", shown="obs"))
    frames, labels, _ = frames_and_labels(episodes)
    assert (frames == PICTURES[1:]).all() and labels == [0, 0, 0, 1]
    last = episodes_in(None, None, written(tmp_path / "demo.hdf5", rewards=(0, 0, 0, 0, 1), shown="obs"))
    _, labels, trajectory = frames_and_labels(last)
    assert labels == [0, 0, 0, 0] and trajectory.positive  # the state of its success is in no frame


def test_libero_success_held_before_its_end_is_unlabelled(tmp_path):
    pictures = np.arange(30, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), dtype=np.uint8)
    options = {"attributes": ["bddl_file_name"], "shown": "obs", "agentview_rgb": pictures}
    path = written(tmp_path / "demo.hdf5", rewards=[0] * 29 + [1], **options)
    frames, labels, _ = frames_and_labels(episodes_in(None, None, path))
    assert frames[:, 0, 0, 0].tolist() == [*range(18), 29] and labels == [0] * 18 + [1]
    path = written(tmp_path / "demo.hdf5", rewards=[0] * 20 + [1] * 10, **options)  # of another program
    frames, labels, _ = frames_and_labels(episodes_in(None, None, path))
    assert len(frames) == 30 and labels == [0] * 20 + [1] * 10


def test_episodes_are_imported_once_with_all_their_cameras(tmp_path):
    path = written(tmp_path / "demo.hdf5", agentview_image=PICTURES, robot0_eye_in_hand_image=PICTURES[:, :4, :4])
    folders = tmp_path / "positive", tmp_path / "negative"
    actual = import_episodes(episodes_in(None, None, path), *folders, "Lift")
    assert (len(actual.positive), len(actual.negative)) == (1, 1)
    [file] = open_folder(folders[0])
    assert file.keys == ["agentview_image", "robot0_eye_in_hand_image"] and file.labels.tolist() == [0, 0, 0, 1, 1]
    assert (file.frames("robot0_eye_in_hand_image") == PICTURES[:, :4, :4].transpose(0, 3, 1, 2)).all()
    assert import_episodes(episodes_in(None, None, path), *folders, "Lift").earlier == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"ee_pos": np.zeros((5, 3)), "shown": "obs"}, "has no pictures, but ee_pos"),
        ({"rewards": (0, 0, 0, 0.5, 1)}, "not each 0 or 1"),
        ({"rewards": np.zeros((5, 1))}, "not each 0 or 1"),
        ({"agentview_image": PICTURES[:4]}, "4 frames of .*agentview_image and 5 rewards"),
        ({"rewards": (1,), "shown": "obs", "agentview_image": PICTURES[:1]}, "has a single row"),
        ({"rewards": (), "agentview_image": PICTURES[:0]}, "has a single row"),
    ],
)
def test_an_episode_without_pictures_or_success_is_named(tmp_path, content, reason):
    path = written(tmp_path / "demo.hdf5", **content)
    with pytest.raises(DataError, match=reason):
        import_episodes(episodes_in(None, None, path), tmp_path / "positive", tmp_path / "negative", "Lift")


def test_an_episode_without_rewards_is_no_failure(tmp_path):
    path = written(tmp_path / "demo.hdf5")
    with pytest.importorskip("h5py").File(path, "a") as file:
        del file["data/demo_2/rewards"]
    with pytest.raises(DataError, match=r"1 of 2 .*demo_2 has no rewards, but dones"):
        import_episodes(episodes_in(None, None, path), tmp_path / "positive", tmp_path / "negative", "Lift")


def test_an_unwritten_dataset_takes_no_memory(tmp_path):
    path = written(tmp_path / "demo.hdf5")
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "a") as file:
        file["data/demo_2/next_obs"].create_dataset("wrist_image", (5, 1 << 20, 1 << 20, 3), dtype="u1", chunks=True)
    with pytest.raises(DataError, match="that the file does not store"):
        import_episodes(episodes_in(None, None, path), tmp_path / "positive", tmp_path / "negative", "Lift")
