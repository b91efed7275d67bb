"""RLinf's episodes are read without running them, and its files and classifiers are written as it reads them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from robot_worlds.squares import SIDE, small_classifier, square_trajectory
from torchvision.models import resnet18

from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm_robots.frames.checkpoint import load_classifier, save_classifier
from vlmrm_robots.frames.foreign_classifiers import export_classifier
from vlmrm_robots.trajectories.importing import episodes_in, import_episodes
from vlmrm_robots.trajectories.rlinf import read_episode, read_payload, write_document_files, write_payload
from vlmrm_robots.trajectories.trajectory import open_folder, write_trajectory

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)


def episode(path: Path, **changes: Any) -> Path:
    """What RLinf's wrapper pickles: an entry of the reset, whose info is empty, and one of each step."""
    observations = [
        {"main_images": torch.from_numpy(frame), "wrist_images": frame, "states": torch.zeros(7), "task": "push"}
        for frame in FRAMES
    ]
    steps = [{"success": torch.tensor(False)}, {"success": np.bool_(True)}, {"episode": {"success_once": True}}]
    content = {"rank": 0, "success": True, "observations": observations, "infos": [{}, *steps], "actions": [FRAMES]}
    path.write_bytes(pickle.dumps(content | changes))
    return path


def test_an_episode_is_read_with_cameras_and_labels(tmp_path):
    trajectory = read_episode(episode(tmp_path / "0.pkl"))
    assert trajectory.labels.tolist() == [0, 0, 1, 1]
    for key in ("main_images", "wrist_images"):
        assert (trajectory.images[key] == FRAMES.transpose(0, 3, 1, 2)).all()
    views = np.stack([FRAMES[0], FRAMES[1]])
    observation = {"main_images": FRAMES[0], "extra_view_images": torch.from_numpy(views)}
    failure = {"success": False}
    trajectory = read_episode(episode(tmp_path / "1.pkl", observations=[observation], infos=[failure], success=False))
    assert (trajectory.images["extra_view_images-1"] == FRAMES[1].transpose(2, 0, 1)).all()
    assert not trajectory.positive


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"observations": []}, "no observations and infos"),
        ({"infos": [{}]}, "4 observations and 1 infos"),
        ({"observations": [{"states": 1}] * 4}, "observation 0 has no main_images: collect with images"),
        ({"observations": [{"main_images": FRAMES[0]}, {"main_images": FRAMES[0][:4]}], "infos": [{}] * 2}, "sizes"),
        (
            {"observations": [{"main_images": torch.zeros(1).expand(9999, 9999, 3)}], "infos": [{}]},
            "more than 16 times",
        ),
    ],
)
def test_what_is_no_episode_is_named(tmp_path, changes, reason):
    with pytest.raises(DataError, match=rf"0\.pkl.*{reason}"):
        read_episode(episode(tmp_path / "0.pkl", **changes))


def test_a_folder_of_episodes_is_imported_once(tmp_path, caplog):
    folders = tmp_path / "positive", tmp_path / "negative"
    (tmp_path / "raw").mkdir()
    episode(tmp_path / "raw" / "0.pkl")
    episode(tmp_path / "raw" / "1.pkl", infos=[{"success": False}] * 4, success=False)
    write_trajectory(tmp_path / "own", square_trajectory(np.random.default_rng(0), 3))
    write_payload(open_folder(tmp_path / "own"), tmp_path / "raw" / "train.pt")
    actual = import_episodes(episodes_in(None, None, tmp_path / "raw"), *folders, "Toy")
    assert (len(actual.positive), len(actual.negative)) == (2, 1)
    assert "train.pt does not say which frames are of one episode" in caplog.text
    again = import_episodes(episodes_in(None, None, tmp_path / "raw"), *folders, "Toy")
    assert again.earlier == 3


@pytest.mark.parametrize(
    "content",
    [
        {"images": [torch.zeros(3, 4, 4)], "labels": []},
        {"images": [torch.zeros(1).expand(3, 9999, 9999)], "labels": [1]},
        {"images": [torch.zeros(3, 4, 4, device="meta")], "labels": [1]},
        {"images": ["text"], "labels": [1]},
        {"images": [torch.zeros(3, 4, 4)], "labels": ["yes"]},
        [1, 2],
    ],
)
def test_what_is_no_payload_is_named(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(DataError, match=r"x\.pt"):
        read_payload(tmp_path / "x.pt")


def test_trajectories_are_written_as_the_document_has_them(tmp_path):
    for successes in (3, 0):
        write_trajectory(tmp_path / "own", square_trajectory(np.random.default_rng(successes), successes))
    files = open_folder(tmp_path / "own")
    positive, negative = write_document_files(files, tmp_path / "out")
    assert (positive.parent.name, negative.parent.name) == ("positive", "negative")
    content = np.load(positive, allow_pickle=True).item()  # as RLinf reads it
    [file] = [file for file in files if file.successes.any()]
    assert content["images"]["base_camera"].dtype == content["labels"].dtype == np.float32
    assert (np.rint(content["images"]["base_camera"] * 255) == file.frames("base_camera")).all()
    payload = tmp_path / "train.pt"
    assert write_payload(files, payload) == 20
    frames = read_payload(payload)
    assert frames.labels.sum() == 3 and len(frames.labels) == 20
    for write, output in ((write_document_files, tmp_path / "out"), (write_payload, payload)):
        with pytest.raises(ConfigError, match=str(output)):  # its files would be replaced
            write(files, output)


# Classifiers ---------------------------------------------------------------------------------------------------------


def test_the_export_includes_the_layer_its_class_keeps(tmp_path):
    model = small_classifier(image_keys=("front", "wrist"))
    save_classifier(tmp_path / "model", model, model.spec)
    assert "BinaryRewardClassifier" in export_classifier(model, tmp_path / "model", tmp_path / "out.pt")
    weights = torch.load(tmp_path / "out.pt", weights_only=True)["model_state_dict"]
    added = {f"encoders.{key}.resnet_backbone.fc.{part}" for key in ("front", "wrist") for part in ("weight", "bias")}
    assert set(weights) - set(model.state_dict()) == added
    loaded = load_classifier(tmp_path / "out.pt", image_size=(3, SIDE, SIDE), device="cpu").model
    images = dict.fromkeys(("front", "wrist"), torch.rand(2, 3, SIDE, SIDE))
    torch.testing.assert_close(loaded(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [None, 16])
def test_a_torchvision_resnet_with_head_is_converted(tmp_path, hidden):
    torch.manual_seed(0)
    theirs = resnet18()
    linear = torch.nn.Linear(512, hidden or 1)
    theirs.fc = linear  # ty: ignore[invalid-assignment]
    if hidden:
        head = torch.nn.Sequential(linear, torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 1))
        theirs.fc = head  # ty: ignore[invalid-assignment]
    theirs(torch.rand(4, 3, SIDE, SIDE))  # statistics of its own
    theirs.eval()
    torch.save({f"module.backbone.{name}": value for name, value in theirs.state_dict().items()}, tmp_path / "r.pt")
    loaded = load_classifier(tmp_path / "r.pt", image_size=(3, SIDE, SIDE), device="cpu")
    images = torch.rand(3, 3, SIDE, SIDE)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = theirs((images - mean) / std).squeeze(-1)
    torch.testing.assert_close(loaded.model({"main_images": images}), expected, rtol=1e-4, atol=1e-5)
    save_classifier(tmp_path / "own", loaded.model, loaded.config)
    assert "ResNetRewardModel" in export_classifier(loaded.model, tmp_path / "own", tmp_path / "out.pt")
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name for name in written if not name.startswith("backbone.fc")} == {
        f"backbone.{name}" for name in theirs.state_dict() if not name.startswith("fc")
    }
    assert (written["backbone.fc.0.weight"][: hidden or 1] == linear.weight).all()


def test_what_is_no_classifier_of_rlinf_is_named(tmp_path):
    torch.save({"backbone.conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "r.pt")
    with pytest.raises(CheckpointError, match=r"\[0, 0, 0, 0\] blocks"):
        load_classifier(tmp_path / "r.pt", image_size=(3, SIDE, SIDE))
    with pytest.raises(ConfigError, match="give image_size"):
        load_classifier(tmp_path / "r.pt")
    model = small_classifier(architecture="resnet18", use_pretrain=True)
    save_classifier(tmp_path / "own", model, model.spec)
    with pytest.raises(ConfigError, match="no class of RLinf"):
        export_classifier(model, tmp_path / "own", tmp_path / "out.pt")
