"""Classifiers on disk: they come back as they were, say what they are, and others' files are told apart."""

from __future__ import annotations

import pytest
import torch
from robot_worlds.squares import SIDE, small_classifier
from safetensors.torch import save_file

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm_robots.frames.checkpoint import load_classifier, save_classifier

# The names of the document's checkpoints, by which others' files are read.
NAMES = {
    "encoders.base_camera.resnet_backbone.conv1.weight",
    "encoders.base_camera.resnet_backbone.layer4.0.downsample.1.bias",
    "encoders.base_camera.pooling_layer.kernel",
    "encoders.base_camera.mlp.0.weight",
    "encoders.base_camera.mlp.1.bias",
    "classifier.0.weight",
    "classifier.2.weight",
    "classifier.4.bias",
}


def scores(model) -> torch.Tensor:
    images = torch.rand(3, *model.spec.image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(dict.fromkeys(model.spec.image_keys, images))


@pytest.mark.parametrize("name", ["model.safetensors", "deep/er/reward_model.pt"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"pooling": "mean"}, {"image_keys": ("front", "wrist")}, {"architecture": "resnet18", "use_pretrain": True}],
)
def test_a_classifier_comes_back_as_it_was(tmp_path, name, changes):
    model = small_classifier(**changes)
    config = model.spec.model_copy(
        update={"threshold": 0.7, "environment": "Squares", "metrics": {"auc": 1.0, "precision": float("nan")}}
    )
    save_classifier(tmp_path / name, model, config)
    loaded = load_classifier(tmp_path / name, device="cpu")
    assert loaded.described
    assert loaded.config.model_dump(exclude={"metrics"}) == config.model_dump(exclude={"metrics"})
    assert (
        loaded.config.metrics["auc"] == 1.0
        and loaded.config.metrics["precision"] != loaded.config.metrics["precision"]
    )
    assert not loaded.model.training and not loaded.model.trainable()
    torch.testing.assert_close(scores(loaded.model), scores(model), rtol=1e-4, atol=1e-5)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [(tmp_path / name).name]


def test_files_that_are_no_classifier_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no reward model .*nowhere\.pt"):
        load_classifier(tmp_path / "nowhere.pt")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="weights and no config"):
        load_classifier(tmp_path / "other.safetensors")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="it is no frame classifier"):
        load_classifier(tmp_path / "other.pt", image_size=(3, SIDE, SIDE))
    model = small_classifier()
    save_classifier(tmp_path / "cut", model, model.spec)
    content = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="no weight file"):
        load_classifier(tmp_path / "cut")


# The document's files ------------------------------------------------------------------------------------------------


def document_file(path, model, **changes):
    weights = dict(model.state_dict())
    for key in model.spec.image_keys:  # torchvision's last layer is in these files, unused
        weights[f"encoders.{key}.resnet_backbone.fc.weight"] = torch.zeros(1000, 512)
        weights[f"encoders.{key}.resnet_backbone.fc.bias"] = torch.zeros(1000)
    content = {
        "epoch": 3,
        "model_state_dict": weights,
        "optimizer_state_dict": {},
        "train_loss": 0.1,
        "train_acc": 0.9,
    }
    torch.save({**content, **changes}, path)
    return path


@pytest.mark.parametrize(("pooling", "pretrained"), [("spatial", True), ("mean", False)])
@pytest.mark.parametrize("keys", [("base_camera",), ("wrist", "front")])
def test_a_document_file_is_read_with_settings_inferred(tmp_path, pooling, pretrained, keys):
    model = small_classifier(
        pooling=pooling, image_keys=keys, image_size=(3, 64, 64), hidden_dim=24, num_spatial_blocks=3
    )
    if keys == ("base_camera",):
        assert set(model.state_dict()) >= NAMES
    loaded = load_classifier(document_file(tmp_path / "old.pt", model), image_size=(3, 64, 64), device="cpu")
    assert not loaded.described
    assert (loaded.config.use_pretrain, loaded.config.pooling) == (pretrained, pooling)
    assert (loaded.config.image_keys, loaded.config.hidden_dim, loaded.config.num_spatial_blocks) == (keys, 24, 3)
    assert loaded.config.threshold == 0.5
    torch.testing.assert_close(scores(loaded.model), scores(model), rtol=1e-4, atol=1e-5)


def test_a_document_file_needs_its_image_size(tmp_path):
    path = document_file(tmp_path / "old.pt", small_classifier(image_size=(3, 64, 64)))
    with pytest.raises(ConfigError, match="give image_size"):
        load_classifier(path)
    with pytest.raises(CheckpointError, match=r"kernel is \[512, 2, 2, 2\] and should be \[512, 4, 4, 2\]"):
        load_classifier(path, image_size=(3, 128, 128))


KERNEL, WIDTH = "encoders.cam.pooling_layer.kernel", "encoders.cam.mlp.0.weight"


def hollow(*shape: int) -> torch.Tensor:
    """A tensor of one stored number and any size."""
    return torch.zeros(1).expand(*shape)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "holds a list and no weights by name"),
        ({"model_state_dict": {KERNEL: torch.zeros(3, 3)}}, "it is no frame classifier"),
        (
            {"model_state_dict": {KERNEL: hollow(512, 2, 2, 1 << 24), WIDTH: hollow(1 << 24, 1)}},
            "kernel has 34359738368 numbers and stores 1",
        ),
        ({"model_state_dict": {KERNEL: torch.zeros(512, 2, 2, 8, dtype=torch.int64)}}, "numbers of torch.int64"),
        ({"model_state_dict": {KERNEL: torch.zeros(3, 3).to_sparse()}}, "is sparse or has no numbers"),
    ],
)
def test_a_foreign_torch_file_is_named(tmp_path, content, reason):
    torch.save(content, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=rf"old\.pt:? .*{reason}"):
        load_classifier(tmp_path / "old.pt", image_size=(3, 64, 64), device="cpu")
