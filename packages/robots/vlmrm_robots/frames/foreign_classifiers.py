"""Classifiers of others to and from a `FrameClassifier`: LeRobot's `reward_classifier` and the two of RLinf.

LeRobot's has one encoder for all cameras, a ResNet of transformers or its own resnet10, whose max pool is padded as
JAX does. RLinf's `BinaryRewardClassifier` has this project's names; `ResNetRewardModel` is a ResNet of torchvision.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import make_folder, require_new_file, require_new_folder, write_file, write_json
from vlmrm.weights import plain_weights, read_weight_file
from vlmrm_robots.frames.classifier import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    LAYERS,
    ClassifierConfig,
    FrameClassifier,
    classifier_config,
)

IMAGES, IMAGE = "observation.images.", "observation.image"
MAIN = "main_images"  # RLinf's camera
SIDE = 128  # pixels: its pooling is for maps of 4 x 4
PARTS = {  # of a camera's encoder, theirs and ours
    "1.kernel": "pooling_layer.kernel",
    "3.weight": "mlp.0.weight",
    "3.bias": "mlp.0.bias",
    "4.weight": "mlp.1.weight",
    "4.bias": "mlp.1.bias",
}
HEAD, OUR_HEAD = "classifier_head.", "classifier."
STATISTICS = {"mean": torch.tensor(IMAGENET_MEAN), "std": torch.tensor(IMAGENET_STD)}
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|model\.)+")
BACKBONE, ENCODER = "backbone.", f"encoders.{MAIN}.resnet_backbone."
HEADS = {"fc.0.": "classifier.0.", "fc.3.": "classifier.3."}  # Linear, ReLU, Dropout, Linear
STAGE = re.compile(r"layer([1-4])\.(\d+)\.conv(\d)\.weight$")


_THRESHOLD = "the last bias is shifted, so that its threshold, {:.3g}, is 0.5"


def _with_threshold(model: FrameClassifier, source: Path) -> dict[str, Tensor]:
    """Return the weights with another last bias: p is above 0.5, the others' threshold, where it was above its own."""
    weights, threshold = model.state_dict(), model.spec.threshold
    if not 0 < threshold < 1:
        raise ConfigError(f"{source} has the threshold {threshold:g}, which no logit has: qualify it before.")
    name = f"classifier.{len(model.classifier) - 1}.bias"
    return {**weights, name: weights[name] - math.log(threshold / (1 - threshold))}


# LeRobot -------------------------------------------------------------------------------------------------------------


def read_lerobot(folder: Path) -> tuple[ClassifierConfig, dict[str, Tensor]]:
    """Return the config of a `reward_classifier` and its weights by this project's names."""
    described = _read_config(folder)
    cameras = {
        key: key.removeprefix(IMAGES).replace(".", "_") for key in described["input_features"] if key.startswith(IMAGE)
    }
    path = folder / "model.safetensors"
    weights = plain_weights(path, read_weight_file(path))
    encoder = _within(weights, "encoder.")
    known = {architecture: _their_names(architecture) for architecture in LAYERS}
    architecture = next((name for name, names in known.items() if encoder and encoder.keys() <= names.keys()), None)
    if architecture is None:
        raise CheckpointError(f"{path} has an encoder that is no resnet10 of LeRobot's, nor a ResNet of transformers.")
    backbone = {known[architecture][name]: value for name, value in encoder.items()}
    named = {OUR_HEAD + name: value for name, value in _within(weights, HEAD).items()}
    for key, camera in cameras.items():
        theirs = _within(weights, f"encoders.{key.replace('.', '_')}.")
        if lacking := [part for part in PARTS if part not in theirs]:
            raise CheckpointError(f"{path} has no {lacking[0]} of {key}: it is no reward_classifier of these cameras.")
        named |= {f"encoders.{camera}.{ours}": theirs[part] for part, ours in PARTS.items()}
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


def _within(weights: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        features, kind = described["input_features"], described["type"]
        sizes = [tuple(one["shape"]) for key, one in features.items() if key.startswith(IMAGE)]
        plain = (described["model_type"], described["num_classes"], described["latent_dim"] - described["hidden_dim"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} has no config.json of a reward_classifier of LeRobot ({error!r}).") from error
    if kind != "reward_classifier" or plain != ("cnn", 2, 0) or not sizes:
        raise CheckpointError(
            f"{folder} is read if it is a reward_classifier of images, with model_type cnn, 2 classes and equal "
            "hidden_dim and latent_dim."
        )
    if wrong := [size for size in sizes if size != (3, SIDE, SIDE)]:
        raise CheckpointError(f"{folder} has images of {list(wrong[0])}: LeRobot's pooling needs [3, {SIDE}, {SIDE}].")
    return described


def _normalisation(folder: Path, described: Mapping[str, Any], keys: list[str]) -> str:
    """Return which normalisation the frames need, by the statistics of LeRobot's preprocessor in the folder."""
    mode = (described.get("normalization_mapping") or {}).get("VISUAL", "IDENTITY")
    if mode == "IDENTITY":
        return "unit"
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*normalizer*.safetensors")):
        stored |= read_weight_file(file)
    for key in keys:
        for name, values in STATISTICS.items():
            found = stored.get(f"{key}.{name}")
            if found is None or found.numel() != 3 or not torch.allclose(found.flatten().float(), values, atol=1e-3):
                raise CheckpointError(
                    f"{folder} normalises {key} by {mode} with other statistics than ImageNet's, or without the "
                    "preprocessor's file of them: only those are read, and IDENTITY."
                )
    return "imagenet"


def _their_names(architecture: str) -> dict[str, str]:
    """Return the names of a ResNet's weights, without counters of batches: LeRobot's and transformers', and ours."""
    block, layers = LAYERS[architecture]
    if architecture == "resnet10":
        modules = {"embedder.0.": "conv1.", "embedder.1.": "bn1."}
        for stage in range(4):
            theirs, ours = f"encoder.stages.{stage}.", f"layer{stage + 1}.0."
            for i in (1, 2):
                modules |= {f"{theirs}conv{i}.": f"{ours}conv{i}.", f"{theirs}norm{i}.": f"{ours}bn{i}."}
                modules[f"{theirs}shortcut.{i - 1}."] = f"{ours}downsample.{i - 1}."
        return {theirs + part: ours + part for theirs, ours in modules.items() for part in ("weight", "bias")}
    convolutions = 3 if block.expansion == 4 else 2
    pairs = {"embedder.embedder.": ("conv1.", "bn1.")}
    for stage, blocks in enumerate(layers):
        for number in range(blocks):
            theirs, ours = f"encoder.stages.{stage}.layers.{number}.", f"layer{stage + 1}.{number}."
            for i in range(convolutions):
                pairs[f"{theirs}layer.{i}."] = (f"{ours}conv{i + 1}.", f"{ours}bn{i + 1}.")
            if number == 0 and (stage > 0 or convolutions == 3):
                pairs[f"{theirs}shortcut."] = (f"{ours}downsample.0.", f"{ours}downsample.1.")
    names = {f"{theirs}convolution.weight": f"{conv}weight" for theirs, (conv, _) in pairs.items()}
    for theirs, (_, norm) in pairs.items():
        parts = ("weight", "bias", "running_mean", "running_var")
        names |= {f"{theirs}normalization.{part}": norm + part for part in parts}
    return names


def write_lerobot(model: FrameClassifier, source: Path, folder: Path) -> str:
    """Write the classifier of a checkpoint, on the CPU, as a `reward_classifier`, and return what to know of it."""
    config, weights = model.spec, _with_threshold(model, source)
    backbones = [_within(weights, f"encoders.{key}.resnet_backbone.") for key in config.image_keys]
    _check_lerobot_can(source, config, backbones)
    names = _their_names(config.architecture).items()
    content = {f"encoder.{theirs}": backbones[0][ours] for theirs, ours in names if ours in backbones[0]}
    for key in config.image_keys:
        start = f"encoders.{(IMAGES + key).replace('.', '_')}."
        content |= {start + part: weights[f"encoders.{key}.{ours}"] for part, ours in PARTS.items()}
    content |= {HEAD + name: value for name, value in _within(weights, OUR_HEAD).items()}
    # nn.BatchNorm2d counts its batches, FrozenBatchNorm2d does not.
    counted = [name for name in content if name.endswith("running_mean")]
    counters = (name.replace("running_mean", "num_batches_tracked") for name in counted)
    content |= {name: torch.zeros((), dtype=torch.int64) for name in counters}
    require_new_folder(folder, "LeRobot's reward_classifier")
    make_folder(folder)
    standardised, resnet = config.normalisation == "imagenet", config.architecture.removeprefix("resnet")
    described = {
        "type": "reward_classifier",
        "input_features": {IMAGES + key: {"type": "VISUAL", "shape": [3, SIDE, SIDE]} for key in config.image_keys},
        "output_features": {},
        "hidden_dim": config.hidden_dim,
        "latent_dim": config.hidden_dim,
        "image_embedding_pooling_dim": config.num_spatial_blocks,
        "model_name": "lerobot/resnet10" if resnet == "10" else f"microsoft/resnet-{resnet}",
        "model_type": "cnn",
        "num_classes": 2,
        "num_cameras": len(config.image_keys),
        "normalization_mapping": {"VISUAL": "MEAN_STD" if standardised else "IDENTITY"},
    }
    write_file(
        folder / "model.safetensors", save_tensors({name: value.contiguous() for name, value in content.items()})
    )
    if standardised:
        stats = {
            f"{IMAGES}{key}.{name}": value.reshape(3, 1, 1).clone()
            for key in config.image_keys
            for name, value in STATISTICS.items()
        }
        write_file(folder / "classifier_preprocessor_step_0_normalizer_processor.safetensors", save_tensors(stats))
    write_json(folder / "config.json", described)
    shown = "; LeRobot's actor shows it pixels in [0, 1]: standardise them before its step" if standardised else ""
    return f"{folder} is LeRobot's reward_classifier; {_THRESHOLD.format(config.threshold)}{shown}"


def _check_lerobot_can(source: Path, config: ClassifierConfig, backbones: list[dict[str, Tensor]]) -> None:
    ten, first = config.architecture == "resnet10", backbones[0]
    reasons = {
        "its architecture": config.pooling != "spatial",
        f"its frames, which are not [3, {SIDE}, {SIDE}]": tuple(config.image_size) != (3, SIDE, SIDE),
        "its crop": bool(config.crop),
        "its max pool": (config.max_pool == "same") != ten,
        "its norms: train it with pretrained weights": not ten and not config.use_pretrain,
        "its encoders, which differ between cameras": any(
            not torch.equal(value, one[name]) for one in backbones[1:] for name, value in first.items()
        ),
    }
    if wrong := [reason for reason, applies in reasons.items() if applies]:
        raise ConfigError(f"{source} cannot be a reward_classifier of LeRobot by {wrong[0]}.")


# RLinf ---------------------------------------------------------------------------------------------------------------


def is_resnet_reward_model(weights: Mapping[str, Any]) -> bool:
    """Return whether a file's names are those of a `ResNetRewardModel`."""
    return any(WRAPPERS.sub("", name) == f"{BACKBONE}conv1.weight" for name in weights)


def from_resnet_reward_model(
    path: Path, weights: Mapping[str, Tensor], image_size: Sequence[int] | None
) -> tuple[ClassifierConfig, dict[str, Tensor]]:
    """Return the config and the weights, by this project's names, of a `ResNetRewardModel`."""
    if image_size is None:
        raise ConfigError(f"{path} does not say the size of its images: give image_size, [C,H,W].")
    bare = {WRAPPERS.sub("", name).removeprefix(BACKBONE): value for name, value in weights.items()}
    bare = {name: value for name, value in bare.items() if name not in ("mean", "std", "_mean", "_std")}
    found = [match.groups() for name in bare if (match := STAGE.match(name))]
    blocks = [1 + max((int(block) for stage, block, _ in found if stage == str(n)), default=-1) for n in range(1, 5)]
    expansion = 4 if any(conv == "3" for *_, conv in found) else 1
    shapes = {name: (layers, block.expansion) for name, (block, layers) in LAYERS.items() if name != "resnet10"}
    names = [name for name, shape in shapes.items() if shape == (blocks, expansion)]
    if not names:
        raise CheckpointError(f"{path} has {blocks} blocks in its layers, as no ResNet of torchvision.")
    if "fc.weight" in bare:
        bare |= _with_hidden_layer(path, bare.pop("fc.weight"), bare.pop("fc.bias", None))
    renamed = {_swapped(name, HEADS, "", ENCODER): value for name, value in bare.items()}
    first = renamed.get("classifier.0.weight")
    if first is None or first.dim() != 2:
        raise CheckpointError(f"{path} has no head fc: it is no ResNetRewardModel.")
    config = classifier_config(
        architecture=names[0],
        image_keys=(MAIN,),
        image_size=tuple(image_size),
        hidden_dim=first.shape[0],
        pooling="average",
        use_pretrain=True,
        freeze_encoder=True,
        normalisation="imagenet",
    )
    return config, renamed


def _swapped(name: str, heads: Mapping[str, str], prefix: str, otherwise: str) -> str:
    """Return a name with another beginning: that of a head's layer, or else `otherwise` in place of `prefix`."""
    for start, other in heads.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return otherwise + name.removeprefix(prefix)


def _with_hidden_layer(path: Path, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Return a linear head as one with two hidden units, of the same logits: z = ReLU(z) - ReLU(-z)."""
    if weight.dim() != 2 or len(weight) != 1 or bias is None or bias.shape != (1,):
        raise CheckpointError(f"{path} has a head of another shape than one logit.")
    return {
        "fc.0.weight": torch.cat([weight, -weight]),
        "fc.0.bias": torch.cat([bias, -bias]),
        "fc.3.weight": torch.tensor([[1.0, -1.0]]),
        "fc.3.bias": torch.zeros(1),
    }


def export_classifier(model: FrameClassifier, source: Path, output: Path) -> str:
    """Write the classifier of a checkpoint, on the CPU, as RLinf loads it strictly, and return what to know of it."""
    require_new_file(output)
    config = model.spec
    if config.crop:
        raise ConfigError(f"{source} looks at the crop {config.crop}, and RLinf's classifiers at whole frames.")
    weights = {name: value.contiguous() for name, value in _with_threshold(model, source).items()}
    content: dict[str, Any]
    plain = config.normalisation == "unit" and config.max_pool == "centred"
    if config.architecture == "resnet10" and config.pooling != "average" and plain:
        # torchvision's last layer, which RLinf's class keeps and does not use.
        for key in config.image_keys:
            weights[f"encoders.{key}.resnet_backbone.fc.weight"] = torch.zeros(1000, 512)
            weights[f"encoders.{key}.resnet_backbone.fc.bias"] = torch.zeros(1000)
        content, name = {"model_state_dict": weights}, "BinaryRewardClassifier"
    elif config.pooling == "average" and config.use_pretrain and config.normalisation == "imagenet":
        if len(config.image_keys) > 1 or config.architecture == "resnet10":
            raise ConfigError(f"{source}: RLinf's ResNetRewardModel has one camera, and no resnet10.")
        heads = {ours: BACKBONE + theirs for theirs, ours in HEADS.items()}
        prefix = f"encoders.{config.image_keys[0]}.resnet_backbone."
        content = {_swapped(name, heads, prefix, BACKBONE): value for name, value in weights.items()}
        for name in [name for name in content if name.endswith("running_mean")]:  # nn.BatchNorm2d counts its batches
            content[name.replace("running_mean", "num_batches_tracked")] = torch.zeros((), dtype=torch.int64)
        name = "ResNetRewardModel"
    else:
        raise ConfigError(
            f"{source} is computed by no class of RLinf: train a resnet10 without ImageNet's normalisation, or a "
            "deeper ResNet with pretrained weights and --pooling average."
        )
    buffer = BytesIO()
    torch.save(content, buffer)
    make_folder(output.parent)
    write_file(output, buffer.getvalue())
    return (
        f"{output} is RLinf's {name} of {config.architecture}, image_size {list(config.image_size)}, hidden_dim "
        f"{config.hidden_dim}; {_THRESHOLD.format(config.threshold)}"
    )
