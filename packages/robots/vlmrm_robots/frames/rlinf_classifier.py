"""Classifiers of RLinf: `BinaryRewardClassifier` of its document, and `ResNetRewardModel` of its main branch.

The document's classifier has this project's names, and a layer besides that nothing uses. The other one is a ResNet of
torchvision with batch norm, whose mean a small head reads: the pooling `average`, with frozen pretrained statistics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.files import make_folder, require_new_file, write_file
from vlmrm_robots.frames.classifier import LAYERS, ClassifierConfig, FrameClassifier, classifier_config
from vlmrm_robots.trajectories.rlinf import MAIN

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|model\.)+")
BACKBONE, ENCODER = "backbone.", f"encoders.{MAIN}.resnet_backbone."
HEADS = {"fc.0.": "classifier.0.", "fc.3.": "classifier.3."}  # Linear, ReLU, Dropout, Linear
STAGE = re.compile(r"layer([1-4])\.(\d+)\.conv(\d)\.weight$")


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
    deepest = 3 if any(conv == "3" for *_, conv in found) else 2
    names = [name for name, (block, layers) in LAYERS.items() if (block.expansion == 4) + 2 == deepest
             and layers == blocks and name != "resnet10"]  # fmt: skip
    if not names:
        raise CheckpointError(f"{path} has {blocks} blocks in its layers, as no ResNet of torchvision.")
    if "fc.weight" in bare:
        bare |= _with_hidden_layer(path, bare.pop("fc.weight"), bare.pop("fc.bias", None))
    renamed = {_renamed(name): value for name, value in bare.items()}
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


def _renamed(name: str) -> str:
    for theirs, ours in HEADS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return ENCODER + name


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
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
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
        content, name = _to_resnet_reward_model(weights, config.image_keys[0]), "ResNetRewardModel"
    else:
        raise ConfigError(
            f"{source} is computed by no class of RLinf: train a resnet10 without ImageNet's normalisation, or a "
            "deeper ResNet with pretrained weights and --pooling average."
        )
    buffer = BytesIO()
    torch.save(content, buffer)
    make_folder(output.parent)
    write_file(output, buffer.getvalue())
    size = list(config.image_size)
    return (
        f"{output} is RLinf's {name} of {config.architecture}, image_size {size}, hidden_dim {config.hidden_dim}; its "
        f"threshold is {config.threshold:.3g}, and RLinf's own 0.5"
    )


def _to_resnet_reward_model(weights: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    prefix, content = f"encoders.{key}.resnet_backbone.", {}
    for name, value in weights.items():
        theirs = name.removeprefix(prefix)
        for fc, ours in HEADS.items():
            if name.startswith(ours):
                theirs = fc + name.removeprefix(ours)
        content[BACKBONE + theirs] = value
        if theirs.endswith("running_mean"):  # counted by nn.BatchNorm2d, and not by FrozenBatchNorm2d
            content[BACKBONE + theirs.replace("running_mean", "num_batches_tracked")] = torch.zeros(
                (), dtype=torch.int64
            )
    return content
