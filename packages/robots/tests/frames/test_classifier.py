"""Classifiers of frames: their parts, what a frame's score depends on, and pretrained encoders."""

from __future__ import annotations

import pytest
import torch
from robot_worlds.squares import SIDE, small_classifier
from safetensors.torch import save_file

from vlmrm.errors import ConfigError
from vlmrm_robots.frames.classifier import FrameClassifier, SpatialLearnedEmbeddings, classifier_config


def frames(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("pooling", "count"), [("spatial", 6_551_081 - 513_000), ("mean", 6_538_793 - 513_000)])
def test_resnet10_has_the_documented_parameters_except_dead_ones(pooling, count):
    model = FrameClassifier(classifier_config(image_keys=("base_camera",), image_size=(3, 64, 64), pooling=pooling))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_learned_pooling_is_a_sum_over_places():
    pooling = SpatialLearnedEmbeddings(3, 2, 4, 5)
    feature_map = torch.randn(2, 3, 2, 4)
    expected = torch.stack([(feature_map * pooling.kernel[..., f]).sum((2, 3)) for f in range(5)], dim=-1)  # [B, C, F]
    torch.testing.assert_close(pooling(feature_map), expected.flatten(1))


@pytest.mark.parametrize("pooling", ["spatial", "mean"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"architecture": "resnet18"}, {"architecture": "resnet18", "use_pretrain": True}]
)
def test_a_frame_score_does_not_depend_on_others(changes, training, pooling):
    model = small_classifier(pooling=pooling, **changes).train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    images = frames(4) * torch.tensor([0.001, 1, 0.3, 0.02])[:, None, None, None]  # one is bright, one is dark
    with torch.no_grad():
        together = model({"base_camera": images})
        alone = torch.cat([model({"base_camera": frame[None]}) for frame in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert together.unique().numel() == 4


def test_each_camera_counts_through_its_own_encoder():
    model = small_classifier(image_keys=("front", "wrist"))
    images = {"front": frames(2, 1), "wrist": frames(2, 2)}
    score = model(images)
    assert score.shape == (2,)
    assert not torch.allclose(score, model({"front": images["wrist"], "wrist": images["front"]}))
    for key in images:
        assert not torch.allclose(score, model({**images, key: frames(2, 3)}))
    torch.testing.assert_close(score, model({"wrist": images["wrist"], "front": images["front"]}))  # by name


def test_other_cameras_and_sizes_are_named():
    model = small_classifier()
    with pytest.raises(ConfigError, match=r"looks at \['base_camera'\], and the images are \['wrist'\]"):
        model({"wrist": frames(1)})
    with pytest.raises(ConfigError, match=r"for frames \[3, 32, 32\], and those of base_camera are \[3, 16, 32\]"):
        model({"base_camera": frames(1)[:, :, :16]})


# Pretrained encoders -------------------------------------------------------------------------------------------------


def encoder_file(folder, prefix: str = "", wrapper: str | None = None, suffix: str = ".safetensors", **changes):
    """The backbone of a random classifier with its classifying layer, as such files have it; and its weights."""
    backbone = small_classifier(seed=7, **changes).encoders["base_camera"].resnet_backbone
    weights = {name: value.clone() for name, value in backbone.state_dict().items()}
    content = {prefix + name: value for name, value in weights.items()}
    content |= {prefix + "fc.weight": torch.zeros(1000, 512), prefix + "fc.bias": torch.zeros(1000)}
    path = folder / f"encoder{suffix}"
    if suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save({wrapper: content} if wrapper else content, path)
    return path, weights


@pytest.mark.parametrize(
    ("architecture", "suffix", "prefix", "wrapper"),
    [("resnet10", ".safetensors", "", None), ("resnet18", ".pt", "module.", "state_dict")],
)
def test_pretrained_weights_are_loaded_into_every_encoder(tmp_path, architecture, suffix, prefix, wrapper):
    changes = {"architecture": architecture, "use_pretrain": True}
    path, weights = encoder_file(tmp_path, prefix, wrapper, suffix, **changes)
    model = small_classifier(image_keys=("front", "wrist"), **changes)
    model.load_encoder(path)
    for encoder in model.encoders.values():
        for name, value in encoder.resnet_backbone.state_dict().items():
            assert torch.equal(value, weights[name]), name
    first, second = (encoder.resnet_backbone.conv1.weight for encoder in model.encoders.values())
    assert first.data_ptr() != second.data_ptr()


def test_only_a_frozen_encoder_gets_no_gradients():
    model = small_classifier(use_pretrain=True, freeze_encoder=True)
    model({"base_camera": frames(2)}).sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    frozen = {name for name, _ in model.named_parameters() if ".resnet_backbone." in name}
    assert frozen and not with_gradient & frozen
    assert with_gradient == {name for name, _ in model.named_parameters()} - frozen
    assert not {id(parameter) for parameter in model.trainable()} & {
        id(parameter) for name, parameter in model.named_parameters() if name in frozen
    }
