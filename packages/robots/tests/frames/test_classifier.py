"""Classifiers of frames: their parts, what a frame's score depends on, and pretrained encoders."""

from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import save_file
from squares import SIDE, small_classifier, small_config

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm_robots.frames.classifier import FrameClassifier, SpatialLearnedEmbeddings, classifier_config


def frames(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("pooling", "count"), [("spatial", 6_551_081 - 513_000), ("mean", 6_538_793 - 513_000)])
def test_resnet10_has_the_parameters_of_the_document_without_the_dead_ones(pooling, count):
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
def test_a_frames_score_does_not_depend_on_the_others(changes, training, pooling):
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


def test_pooling_by_place_knows_where_things_are_and_by_mean_does_not():
    for pooling, differs in (("spatial", True), ("mean", False)):
        model = small_classifier(image_size=(3, 64, 64), pooling=pooling)
        encoded = torch.randn(1, 1, 512, 2, 2)
        same = torch.allclose(model.decide(encoded), model.decide(encoded.flip(-1)), atol=1e-6)
        assert same is not differs


def test_each_camera_has_an_encoder_of_its_own_and_all_of_them_count():
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


def test_grey_frames_have_one_channel():
    model = small_classifier(image_size=(1, SIDE, SIDE))
    assert model({"base_camera": frames(2)[:, :1]}).shape == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "resnet11"}, "architecture"),
        ({"image_keys": ()}, "image_keys"),
        ({"image_keys": ("a", "a")}, "named twice"),
        ({"image_keys": ("a.b",)}, "no dot"),
        ({"image_size": (4, 32, 32)}, r"\[4, 32, 32\]"),
        ({"hidden_dim": 0}, "hidden_dim"),
        ({"freeze_encoder": True}, "keeps random ones"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        FrameClassifier(small_config(**changes))


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
    ("suffix", "prefix", "wrapper"),
    [(".safetensors", "", None), (".pt", "", None), (".pt", "module.", "state_dict"), (".pt", "_orig_mod.", None)],
)
@pytest.mark.parametrize("architecture", ["resnet10", "resnet18"])
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


def test_weights_that_do_not_fit_are_refused_with_counts(tmp_path):
    path, _ = encoder_file(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit .*layer1.1.conv1.weight is missing \(\d+ such weights\)"):
        small_classifier(architecture="resnet18").load_encoder(path)
    with pytest.raises(CheckpointError, match=r"conv1.weight is \[64, 3, 7, 7\] and should be \[64, 1, 7, 7\]"):
        small_classifier(image_size=(1, SIDE, SIDE)).load_encoder(path)
    with pytest.raises(CheckpointError, match=r"there is no file .*nowhere.pt"):
        small_classifier().load_encoder(tmp_path / "nowhere.pt")


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_weight_files_that_would_run_something_are_refused(tmp_path, write):
    write({"conv1.weight": Harm()}, tmp_path / "harm.pt")
    with pytest.raises(CheckpointError, match="no weight file that can be read safely"):
        small_classifier().load_encoder(tmp_path / "harm.pt")


def test_a_frozen_encoder_gets_no_gradients_and_the_rest_does():
    model = small_classifier(use_pretrain=True, freeze_encoder=True)
    model({"base_camera": frames(2)}).sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    frozen = {name for name, _ in model.named_parameters() if ".resnet_backbone." in name}
    assert frozen and not with_gradient & frozen
    assert with_gradient == {name for name, _ in model.named_parameters()} - frozen
    assert not {id(parameter) for parameter in model.trainable()} & {
        id(parameter) for name, parameter in model.named_parameters() if name in frozen
    }
