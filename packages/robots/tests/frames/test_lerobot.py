"""LeRobot's classifiers compute the same here, and its datasets are asked of its own library.

That library itself is driven in drives/neighbours/drive_lerobot.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pyarrow import parquet
from robot_worlds.squares import small_classifier
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

from vlmrm.errors import CheckpointError, ConfigError, DataError
from vlmrm_robots.frames.checkpoint import load_classifier, save_classifier
from vlmrm_robots.frames.foreign_classifiers import write_lerobot
from vlmrm_robots.trajectories.importing import import_episodes
from vlmrm_robots.trajectories.lerobot import episodes_of, write_dataset
from vlmrm_robots.trajectories.trajectory import TrajectoryFile, open_folder

CAMERAS = ("observation.images.front", "observation.images.wrist")
HIDDEN, MAPS = 12, 3


class Theirs(nn.Module):
    """What LeRobot computes: a ResNet of transformers for all cameras, a pooling of 4 x 4 and a head."""

    def __init__(self):
        super().__init__()
        sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
        self.encoder = ResNetModel(ResNetConfig(**sizes))
        self.encoders = nn.ModuleDict()
        for key in CAMERAS:
            part = nn.Module()
            part.kernel = nn.Parameter(torch.randn(512, 4, 4, MAPS) / 4)
            parts = {"1": part, "3": nn.Linear(512 * MAPS, HIDDEN), "4": nn.LayerNorm(HIDDEN)}
            self.encoders[key.replace(".", "_")] = nn.ModuleDict(parts)
        width = HIDDEN * len(CAMERAS)
        head = [nn.Linear(width, HIDDEN), nn.Dropout(0.1), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)]
        self.classifier_head = nn.Sequential(*head)

    def forward(self, images: dict[str, Tensor]) -> Tensor:
        features = []
        for key, frames in images.items():
            parts = self.encoders[key.replace(".", "_")]
            maps = self.encoder(frames).last_hidden_state.unsqueeze(-1)
            pooled = (maps * parts["1"].kernel).sum((2, 3)).flatten(1)  # ty: ignore
            features.append(torch.tanh(parts["4"](parts["3"](pooled))))  # ty: ignore
        return self.classifier_head(torch.hstack(features)).squeeze(-1)


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    torch.manual_seed(0)
    model = Theirs()
    with torch.no_grad():
        model({key: torch.rand(4, 3, 128, 128) for key in CAMERAS})  # statistics of its own
    return model.eval()


def write_theirs(folder: Path, model: nn.Module, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    described = {
        "type": "reward_classifier",
        "input_features": {key: {"type": "VISUAL", "shape": [3, 128, 128]} for key in CAMERAS},
        "hidden_dim": HIDDEN,
        "latent_dim": HIDDEN,
        "image_embedding_pooling_dim": MAPS,
        "model_type": "cnn",
        "num_classes": 2,
        "normalization_mapping": {"VISUAL": "IDENTITY"},
    }
    (folder / "config.json").write_text(json.dumps(described | changes))
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def test_a_reward_classifier_computes_the_same_both_ways(tmp_path, theirs):
    loaded = load_classifier(write_theirs(tmp_path / "theirs", theirs), device="cpu")
    assert loaded.config.image_keys == ("front", "wrist") and loaded.config.architecture == "resnet18"
    images = {key: torch.rand(3, 3, 128, 128) for key in CAMERAS}
    with torch.no_grad():
        expected = theirs(images)
        actual = loaded.model({key.removeprefix("observation.images."): frames for key, frames in images.items()})
    torch.testing.assert_close(actual.sigmoid(), expected.sigmoid(), rtol=0, atol=1e-6)
    save_classifier(tmp_path / "own", loaded.model, loaded.config)
    assert "reward_classifier" in write_lerobot(loaded.model, tmp_path / "own", tmp_path / "back")
    written, kept = load_file(tmp_path / "back" / "model.safetensors"), theirs.state_dict()
    assert written.keys() == kept.keys()
    assert all((written[name] == value).all() for name, value in kept.items() if "num_batches" not in name)


def test_lerobot_resnet10_pads_max_pool_like_jax(tmp_path):
    model = small_classifier(image_size=(3, 128, 128), use_pretrain=True, freeze_encoder=True, max_pool="same")
    save_classifier(tmp_path / "own", model, model.spec)
    write_lerobot(model, tmp_path / "own", tmp_path / "theirs")
    loaded = load_classifier(tmp_path / "theirs", device="cpu")
    assert loaded.config.max_pool == "same"
    frames = {"base_camera": torch.rand(2, 3, 128, 128)}
    torch.testing.assert_close(loaded.model(frames), model(frames), rtol=1e-4, atol=1e-5)
    pool, picture = model.encoders["base_camera"].resnet_backbone.maxpool, torch.rand(1, 1, 6, 6)  # ty: ignore
    assert pool(picture)[0, 0, -1, -1] == picture[0, 0, 4:, 4:].max()
    assert pool(picture)[0, 0, 0, 0] == picture[0, 0, :3, :3].max()


def test_imagenets_normalisation_is_known_by_the_preprocessors_file(tmp_path, theirs):
    folder = write_theirs(tmp_path / "theirs", theirs, normalization_mapping={"VISUAL": "MEAN_STD"})
    with pytest.raises(CheckpointError, match=r"other statistics than ImageNet's, or without"):
        load_classifier(folder, device="cpu")
    stats = {"mean": torch.tensor([0.485, 0.456, 0.406]), "std": torch.tensor([0.229, 0.224, 0.225])}
    stored = {f"{key}.{name}": value.clone() for key in CAMERAS for name, value in stats.items()}
    save_file(stored, folder / "classifier_preprocessor_step_0_normalizer_processor.safetensors")
    assert load_classifier(folder, device="cpu").config.normalisation == "imagenet"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "sarm"}, "is read if it is a reward_classifier"),
        ({"num_classes": 3}, "is read if it is a reward_classifier"),
        ({"latent_dim": None}, "no config.json of a reward_classifier"),
        ({"input_features": 3}, "no config.json of a reward_classifier"),
        ({"input_features": {CAMERAS[0]: {"shape": [3, 64, 64]}}}, r"images of \[3, 64, 64\]"),
        ({"input_features": {"observation.image": {"shape": [3, 128, 128]}}}, "it is no reward_classifier of these"),
        ({"hidden_dim": 0, "latent_dim": 0}, "no classifier that can be built"),
    ],
)
def test_what_is_no_such_classifier_is_named(tmp_path, theirs, changes, reason):
    with pytest.raises(CheckpointError, match=reason):
        load_classifier(write_theirs(tmp_path / "theirs", theirs, **changes), device="cpu")


def test_a_classifier_lerobot_cannot_compute_is_not_written(tmp_path):
    model = small_classifier()
    save_classifier(tmp_path / "own", model, model.spec)
    with pytest.raises(ConfigError, match="by its frames"):
        write_lerobot(model, tmp_path / "own", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


class FakeDataset(list):
    """Rows in memory, by the part of LeRobot's interface that is used."""

    def __init__(self, fps: int, cameras: dict[str, tuple[int, int]], length: int = 4):
        row = {f"observation.images.{key}": torch.rand(3, *size) for key, size in cameras.items()}
        super().__init__(row | {"task": "push", "next.success": torch.tensor([t == 3])} for t in range(length))
        episodes = [{"dataset_from_index": 0, "dataset_to_index": length}]
        features = {name: {} for name in (*row, "next.success")}
        self.meta = SimpleNamespace(camera_keys=[*row], features=features, episodes=episodes, fps=fps)
        self.root = "its folder"

    @classmethod
    def create(cls, name: str, fps: int, features: dict, root: Path, use_videos: bool) -> FakeDataset:
        if any("/" in name for name in features):
            raise ValueError("names of features have no '/'")
        root.mkdir()
        made = cls(fps, {}, 0)
        made.root = str(root)
        return made

    add_frame = list.append

    def save_episode(self) -> None:
        Path(self.root, "fps").write_text(str(self.meta.fps))

    finalize = save_episode


def imported(dataset: FakeDataset, folder: Path, monkeypatch, *label: str | bool) -> list[TrajectoryFile]:
    monkeypatch.setattr("vlmrm_robots.trajectories.lerobot._library", lambda: lambda source: dataset)
    import_episodes(episodes_of("someone/set", *label), folder / "positive", folder / "negative", "Toy")
    monkeypatch.setattr("vlmrm_robots.trajectories.lerobot._library", lambda: FakeDataset)
    return open_folder(folder / "positive")


def test_a_dataset_keeps_its_task_and_frame_rate(tmp_path, monkeypatch):
    dataset = FakeDataset(30, {"front": (6, 8), "wrist.left": (4, 4)})
    [file] = imported(dataset, tmp_path / "fast", monkeypatch)
    assert file.metadata["task"] == "push" and file.labels.tolist() == [0, 0, 0, 1]
    assert file.keys == ["front", "wrist_left"]
    expected = np.rint(255 * dataset[0]["observation.images.front"].numpy())
    assert (file.frame("front", 0) == expected).all()
    write_dataset([file], tmp_path / "set")
    assert (tmp_path / "set" / "fps").read_text() == "30"
    slow = imported(FakeDataset(20, {"front": (6, 8), "wrist.left": (4, 4)}), tmp_path / "slow", monkeypatch)
    with pytest.raises(DataError, match="of 30, 20 frames a second: give fps"):
        write_dataset([file, *slow], tmp_path / "both")
    write_dataset([file, *slow], tmp_path / "both", fps=25)
    assert (tmp_path / "both" / "fps").read_text() == "25"
    with pytest.raises(ConfigError, match="at least one frame a second"):
        write_dataset([file], tmp_path / "none", fps=0)


def test_a_label_of_how_an_episode_ends_is_of_its_last_frame(tmp_path, monkeypatch):
    """RLinf's export and LeRobot's recordings copy `is_success` to every row."""
    dataset = FakeDataset(10, {"front": (4, 4)})
    dataset.meta.features["is_success"] = {}
    for row in dataset:
        row["is_success"] = torch.tensor([True])
    with pytest.raises(DataError, match=r"is_success is a success in every row of an episode.* give --last-frame"):
        imported(dataset, tmp_path, monkeypatch, "is_success")
    [file] = imported(dataset, tmp_path, monkeypatch, "is_success", True)
    assert file.labels.tolist() == [0, 0, 0, 1]


def test_a_dataset_has_the_progress_that_a_model_says(tmp_path, monkeypatch):
    [file] = imported(FakeDataset(30, {"front": (6, 8)}), tmp_path, monkeypatch)
    said = {"episode": str(file.path), "steps": [0, 2], "scores": [0.2, 0.6]}
    (tmp_path / "said.jsonl").write_text(json.dumps(said))

    write_dataset([file], tmp_path / "set", progress=tmp_path / "said.jsonl")

    written = parquet.read_table(tmp_path / "set" / "sarm_progress.parquet")["progress_sparse"].to_pylist()
    assert written == pytest.approx([0.2, 0.4, 0.6, 0.6])
    for changed, reason in (
        ({"scores": [-1, 0.5]}, "outside of"),
        ({"episode": "b"}, "says nothing of"),
        ({"steps": [0]}, "no file of"),
    ):
        (tmp_path / "said.jsonl").write_text(json.dumps(said | changed))
        with pytest.raises(DataError, match=reason):
            write_dataset([file], tmp_path / "other", progress=tmp_path / "said.jsonl")


def test_lerobot_datasets_without_lerobot_say_how_to_install(tmp_path):
    if "lerobot" in sys.modules:
        pytest.skip("lerobot is installed")
    with pytest.raises(ConfigError, match=r"pip install 'lerobot\[dataset\]'.* in an environment of their own"):
        episodes_of(str(tmp_path))
