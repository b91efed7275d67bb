"""Checkpoints of frame classifiers: a safetensors file with its `ClassifierConfig`, or a file of RLinf or LeRobot.

The config is JSON in the file's metadata. A `.pt` file holds `model_state_dict` and no config: cameras and widths are
inferred from its weights, `use_pretrain` from the kernel of its pooling (1 x 1: false), and the image size is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError, first_line
from vlmrm.files import make_folder, write_file
from vlmrm.libraries import parse_device
from vlmrm.modeling.published_weights import is_torch_file, load_exactly, plain_weights, read_weights
from vlmrm_robots.frames.classifier import (
    LAYERS,
    ClassifierConfig,
    FrameClassifier,
    build_classifier,
    classifier_config,
)
from vlmrm_robots.frames.drift import Reference
from vlmrm_robots.frames.lerobot_classifier import read_lerobot
from vlmrm_robots.frames.rlinf_classifier import from_resnet_reward_model, is_resnet_reward_model

KERNEL = re.compile(r"encoders\.([^.]+)\.pooling_layer\.kernel$")
REFERENCE = "reference."  # before the names of a `Reference`'s tensors
UNUSED = re.compile(r"encoders\.[^.]+\.resnet_backbone\.fc\.")  # torchvision's head, which RLinf's files hold


@dataclass(frozen=True)
class LoadedClassifier:
    """A classifier in eval mode without gradients; `described` if its file has a config."""

    model: FrameClassifier
    config: ClassifierConfig
    described: bool
    path: Path
    reference: Reference | None  # of the frames that it knows


def save_classifier(
    path: Path | str, model: FrameClassifier, config: ClassifierConfig, reference: Reference | None = None
) -> None:
    """Write weights and config atomically as safetensors, whatever the suffix; ConfigError if that is impossible."""
    path = Path(path)
    weights = dict(model.state_dict())
    if reference is not None:
        weights |= {REFERENCE + name: value for name, value in vars(reference).items()}
    weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    make_folder(path.parent)
    write_file(path, save(weights, {"config": config.model_dump_json()}))


def load_classifier(
    path: Path | str, *, image_size: Sequence[int] | None = None, device: str | torch.device | None = None
) -> LoadedClassifier:
    """Load a classifier from a file of `save_classifier`, RLinf's (no pickle is run) or LeRobot's folder.

    Args:
        image_size: [C,H,W], for RLinf's, which do not tell it.
        device: default: the GPU if there is one.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"there is no reward model {path}: train one (`vlmrm frames train --help`).")
    weights = {} if path.is_dir() else read_weights(path)
    described = not path.is_dir() and not is_torch_file(path) and not is_resnet_reward_model(weights)
    if described:
        config = read_config(path)
    elif path.is_dir():
        config, weights = read_lerobot(path)
    elif is_resnet_reward_model(weights):
        config, weights = from_resnet_reward_model(path, plain_weights(path, weights), image_size)
    else:
        weights = {name: value for name, value in plain_weights(path, weights).items() if not UNUSED.match(name)}
        config = _infer_config(path, weights, image_size)
    # On the meta device, a config takes no memory for sizes that it merely claims before they are the weights'.
    on_meta = torch.device("meta") if config.architecture in LAYERS else nullcontext()
    try:
        with torch.random.fork_rng(devices=[]), on_meta:
            model = build_classifier(config)
    except RuntimeError as error:
        raise CheckpointError(f"{path} has a config of impossible sizes ({first_line(error)}).") from error
    kept = {name: value for name, value in weights.items() if described and name.startswith(REFERENCE)}
    load_exactly(model, {name: value for name, value in weights.items() if name not in kept}, str(path))
    model = model.to(parse_device(device)).to(memory_format=torch.channels_last)  # faster convolutions
    reference = _reference(path, kept, model) if kept else None
    return LoadedClassifier(model.eval().requires_grad_(False), config, described, path, reference)


def _reference(path: Path, weights: Mapping[str, Tensor], model: FrameClassifier) -> Reference:
    stored = {name.removeprefix(REFERENCE): list(value.shape) for name, value in weights.items()}
    cameras, width = len(model.spec.image_keys), model.feature_width
    shapes = {"mean": [cameras, width], "whitening": [cameras, width, width], "limit": [], "doubt": []}
    if stored != shapes:
        raise CheckpointError(f"{path} has a reference of {stored} for a classifier of {shapes}: train it again.")
    return Reference(**{name: weights[REFERENCE + name].float() for name in shapes}).to(model.device)


def read_config(path: Path | str) -> ClassifierConfig:
    """Read the config of a file of `save_classifier`, without its weights; CheckpointError if it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("config")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no frame classifier ({error}): check the path.") from error
    if text is None:
        raise CheckpointError(f"{path} has weights and no config: it was not written by `vlmrm frames train`.")
    try:
        return ClassifierConfig.model_validate_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} has a config that this version cannot read ({first_line(error)}).") from error


def _infer_config(path: Path, weights: Mapping[str, Any], image_size: Sequence[int] | None) -> ClassifierConfig:
    keys = [match[1] for name in weights if (match := KERNEL.match(name))]
    if not keys:
        raise CheckpointError(f"{path} has no encoders.*.pooling_layer.kernel: it is no frame classifier.")
    kernel = _tensor_of(path, weights, f"encoders.{keys[0]}.pooling_layer.kernel", 4)
    width = _tensor_of(path, weights, f"encoders.{keys[0]}.mlp.0.weight", 2)
    if image_size is None:
        raise ConfigError(f"{path} does not say the size of its images: give image_size, [C,H,W].")
    spatial = kernel.shape[1:3] != (1, 1)
    try:
        return classifier_config(
            architecture="resnet10",
            image_keys=tuple(keys),
            image_size=tuple(image_size),
            hidden_dim=width.shape[0],
            num_spatial_blocks=kernel.shape[3],
            pooling="spatial" if spatial else "mean",
            use_pretrain=spatial,
            freeze_encoder=spatial,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path} is no classifier that can be built: {error}") from error


def _tensor_of(path: Path, weights: Mapping[str, Tensor], name: str, sides: int) -> Tensor:
    if name not in weights:
        raise CheckpointError(f"{path} has no {name}: it is no frame classifier.")
    if weights[name].dim() != sides:
        raise CheckpointError(f"{path}: {name} is {list(weights[name].shape)}, and should have {sides} sides.")
    return weights[name]
