"""LeRobot's `reward_classifier`: a folder with config.json and model.safetensors, to and from a `ResNetClassifier`.

All its cameras share one encoder, a ResNet of transformers or LeRobot's own resnet10, whose max pool is padded as JAX
does. LeRobot computes the encoder, the pooling and the projection without gradients, so it trains the head alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import make_folder, require_new_folder, write_file, write_json
from vlmrm.modeling.published_weights import plain_weights, read_weights
from vlmrm_robots.frames.classifier import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    LAYERS,
    ClassifierConfig,
    FrameClassifier,
    classifier_config,
)

IMAGES, IMAGE = "observation.images.", "observation.image"
SIDE = 128  # pixels: its pooling is for maps of 4 x 4
# Names in the encoder, theirs and ours; those of resnet10, then those of transformers' ResNet.
TENS = {
    r"embedder\.0\.": "conv1.",
    r"embedder\.1\.": "bn1.",
    r"encoder\.stages\.(\d)\.conv(\d)\.": r"layer{}.0.conv\2.",
    r"encoder\.stages\.(\d)\.norm(\d)\.": r"layer{}.0.bn\2.",
    r"encoder\.stages\.(\d)\.shortcut\.(\d)\.": r"layer{}.0.downsample.\2.",
}
PARTS = {  # of a camera's encoder, and of the head
    "1.kernel": "pooling_layer.kernel",
    "3.weight": "mlp.0.weight",
    "3.bias": "mlp.0.bias",
    "4.weight": "mlp.1.weight",
    "4.bias": "mlp.1.bias",
}
HEAD = "classifier_head."


def read_lerobot(folder: Path) -> tuple[ClassifierConfig, dict[str, Tensor]]:
    """Return the config of a `reward_classifier` and its weights by this project's names."""
    described = _read_config(folder)
    cameras = {key: _camera(key) for key in described["input_features"] if key.startswith(IMAGE)}
    path = folder / "model.safetensors"
    weights = plain_weights(path, read_weights(path))
    encoder = {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
    architecture, backbone = _backbone(path, encoder)
    named = {
        "classifier." + name.removeprefix(HEAD): value for name, value in weights.items() if name.startswith(HEAD)
    }
    for key, camera in cameras.items():
        for theirs, ours in PARTS.items():
            name = f"encoders.{key.replace('.', '_')}.{theirs}"
            if name not in weights:
                raise CheckpointError(f"{path} has no {name}: it is no reward_classifier of these cameras.")
            named[f"encoders.{camera}.{ours}"] = weights[name]
        named |= {f"encoders.{camera}.resnet_backbone.{name}": value.clone() for name, value in backbone.items()}
    try:
        config = classifier_config(
            architecture=architecture,
            image_keys=tuple(cameras.values()),
            image_size=(3, SIDE, SIDE),
            hidden_dim=described["hidden_dim"],
            num_spatial_blocks=described["image_embedding_pooling_dim"],
            use_pretrain=True,
            freeze_encoder=True,
            normalisation=_normalisation(folder, described, list(cameras)),
            max_pool="same" if architecture == "resnet10" else "centred",
        )
    except ConfigError as error:
        raise CheckpointError(f"{folder} is no classifier that can be built: {error}") from error
    return config, named


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        features, kind = described["input_features"], described["type"]
        sizes = {key: tuple(one["shape"]) for key, one in features.items() if key.startswith(IMAGE)}
        plain = (described["model_type"], described["num_classes"], described["latent_dim"] - described["hidden_dim"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} has no config.json of a reward_classifier of LeRobot ({error!r}).") from error
    if kind != "reward_classifier" or plain != ("cnn", 2, 0) or not sizes:
        raise CheckpointError(
            f"{folder} is read if it is a reward_classifier of images, with model_type cnn, 2 classes and equal "
            "hidden_dim and latent_dim."
        )
    if wrong := [size for size in sizes.values() if size != (3, SIDE, SIDE)]:
        raise CheckpointError(f"{folder} has images of {list(wrong[0])}: LeRobot's pooling needs [3, {SIDE}, {SIDE}].")
    return described


def _camera(key: str) -> str:
    return key.removeprefix(IMAGES).replace(".", "_")


def _normalisation(folder: Path, described: Mapping[str, Any], keys: list[str]) -> str:
    """Return which normalisation the frames need, by the statistics of LeRobot's preprocessor in the folder."""
    mode = (described.get("normalization_mapping") or {}).get("VISUAL", "IDENTITY")
    if mode == "IDENTITY":
        return "unit"
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*normalizer*.safetensors")):
        stored |= read_weights(file)
    expected = {"mean": torch.tensor(IMAGENET_MEAN), "std": torch.tensor(IMAGENET_STD)}
    for key in keys:
        for name, values in expected.items():
            found = stored.get(f"{key}.{name}")
            if found is None or found.numel() != 3 or not torch.allclose(found.flatten().float(), values, atol=1e-3):
                raise CheckpointError(
                    f"{folder} normalises {key} by {mode} with other statistics than ImageNet's, or without the "
                    "preprocessor's file of them: only those are read, and IDENTITY."
                )
    return "imagenet"


def _backbone(path: Path, encoder: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    if "embedder.0.weight" in encoder:
        return "resnet10", {_renamed_ten(name): value for name, value in encoder.items()}
    for architecture, (block, layers) in LAYERS.items():
        names = _transformers_names(layers, 1 + block.expansion // 4 + 1)
        if architecture != "resnet10" and names.keys() == encoder.keys():
            return architecture, {names[name]: value for name, value in encoder.items()}
    raise CheckpointError(f"{path} has an encoder that is neither LeRobot's resnet10 nor a ResNet of transformers.")


def _renamed_ten(name: str) -> str:
    for theirs, ours in TENS.items():
        if match := re.match(theirs, name):
            stage = int(match[1]) + 1 if match.groups() else 0
            return match.expand(ours.replace("{}", str(stage))) + name[match.end() :]
    return name


def _transformers_names(layers: list[int], convolutions: int) -> dict[str, str]:
    """Return transformers' names of a ResNet's weights, without counters of batches, and torchvision's."""
    pairs = {"embedder.embedder.": ("conv1.", "bn1.")}
    for stage, blocks in enumerate(layers):
        for block in range(blocks):
            theirs, ours = f"encoder.stages.{stage}.layers.{block}.", f"layer{stage + 1}.{block}."
            for i in range(convolutions):
                pairs[f"{theirs}layer.{i}."] = (f"{ours}conv{i + 1}.", f"{ours}bn{i + 1}.")
            if block == 0 and (stage > 0 or convolutions == 3):
                pairs[f"{theirs}shortcut."] = (f"{ours}downsample.0.", f"{ours}downsample.1.")
    names = {f"{theirs}convolution.weight": f"{conv}weight" for theirs, (conv, _) in pairs.items()}
    for theirs, (_, norm) in pairs.items():
        parts = ("weight", "bias", "running_mean", "running_var")
        names |= {f"{theirs}normalization.{part}": norm + part for part in parts}
    return names


def write_lerobot(model: FrameClassifier, source: Path, folder: Path) -> str:
    """Write the classifier of a checkpoint, on the CPU, as a `reward_classifier`, and return what to know of it."""
    config, weights = model.spec, model.state_dict()
    backbones = [
        {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
        for start in (f"encoders.{key}.resnet_backbone." for key in config.image_keys)
    ]
    _check_lerobot_can(source, config, backbones)
    theirs = {theirs: ours for theirs, ours in _their_names(config).items() if ours in backbones[0]}
    content = {f"encoder.{name}": backbones[0][ours] for name, ours in theirs.items()}
    for key in config.image_keys:
        for part, ours in PARTS.items():
            name = f"encoders.{(IMAGES + key).replace('.', '_')}.{part}"
            content[name] = weights[f"encoders.{key}.{ours}"]
    for name, value in weights.items():
        if name.startswith("classifier."):
            content[HEAD + name.removeprefix("classifier.")] = value
    # nn.BatchNorm2d counts its batches, FrozenBatchNorm2d does not.
    counted = [
        name.replace("running_mean", "num_batches_tracked") for name in content if name.endswith("running_mean")
    ]
    content |= {name: torch.zeros((), dtype=torch.int64) for name in counted}
    require_new_folder(folder, "LeRobot's reward_classifier")
    make_folder(folder)
    feature = {"type": "VISUAL", "shape": [3, SIDE, SIDE]}
    ten = config.architecture == "resnet10"
    described = {
        "type": "reward_classifier",
        "input_features": {IMAGES + key: feature for key in config.image_keys},
        "output_features": {},
        "hidden_dim": config.hidden_dim,
        "latent_dim": config.hidden_dim,
        "image_embedding_pooling_dim": config.num_spatial_blocks,
        "model_name": "lerobot/resnet10" if ten else f"microsoft/resnet-{config.architecture.removeprefix('resnet')}",
        "model_type": "cnn",
        "num_classes": 2,
        "num_cameras": len(config.image_keys),
        "normalization_mapping": {"VISUAL": "MEAN_STD" if config.normalisation == "imagenet" else "IDENTITY"},
    }
    write_file(folder / "model.safetensors", save({name: value.contiguous() for name, value in content.items()}))
    if config.normalisation == "imagenet":
        values = {"mean": torch.tensor(IMAGENET_MEAN), "std": torch.tensor(IMAGENET_STD)}
        stats = {
            f"{IMAGES}{key}.{name}": value.reshape(3, 1, 1).clone()
            for key in config.image_keys
            for name, value in values.items()
        }
        write_file(folder / "classifier_preprocessor_step_0_normalizer_processor.safetensors", save(stats))
    write_json(folder / "config.json", described)
    shown = "; LeRobot's actor shows it pixels in [0, 1]: standardise them before its step"
    return (
        f"{folder} is LeRobot's reward_classifier; its threshold is {config.threshold:.3g}, and LeRobot's own 0.5"
        f"{shown if config.normalisation == 'imagenet' else ''}"
    )


def _their_names(config: ClassifierConfig) -> dict[str, str]:
    block, layers = LAYERS[config.architecture]
    if config.architecture != "resnet10":
        return _transformers_names(layers, 1 + block.expansion // 4 + 1)
    names = ["embedder.0.weight", "embedder.1.weight", "embedder.1.bias"]
    for stage in range(4):
        start = f"encoder.stages.{stage}."
        names += [f"{start}conv{i}.weight" for i in (1, 2)] + [f"{start}shortcut.0.weight"]
        names += [f"{start}{norm}.{part}" for norm in ("norm1", "norm2", "shortcut.1") for part in ("weight", "bias")]
    return {name: _renamed_ten(name) for name in names}


def _check_lerobot_can(source: Path, config: ClassifierConfig, backbones: list[dict[str, Tensor]]) -> None:
    ten = config.architecture == "resnet10"
    reasons = {
        "its architecture": config.architecture not in LAYERS or config.pooling != "spatial",
        f"its frames, which are not [3, {SIDE}, {SIDE}]": tuple(config.image_size) != (3, SIDE, SIDE),
        "its crop": bool(config.crop),
        "its max pool": (config.max_pool == "same") != ten,
        "its norms: train it with pretrained weights": not ten and not config.use_pretrain,
        "its encoders, which differ between cameras": any(
            not torch.equal(value, one[name]) for one in backbones[1:] for name, value in backbones[0].items()
        ),
    }
    if wrong := [reason for reason, applies in reasons.items() if applies]:
        raise ConfigError(f"{source} cannot be a reward_classifier of LeRobot by {wrong[0]}.")
