"""Checkpoints of frame classifiers: a safetensors file with its `ClassifierConfig`, or a file of RLinf or LeRobot.

The config is JSON in the file's metadata. A `.pt` file holds `model_state_dict` and no config: cameras and widths are
inferred from its weights, `use_pretrain` from the kernel of its pooling (1 x 1: false), and the image size is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError, first_line
from vlmrm.files import make_folder, write_file
from vlmrm.libraries import parse_device
from vlmrm.weights import is_torch_file, load_exactly, plain_weights, read_weight_file
from vlmrm_robots.frames.classifier import ClassifierConfig, FrameClassifier, classifier_config
from vlmrm_robots.frames.foreign_classifiers import from_resnet_reward_model, is_resnet_reward_model, read_lerobot

KERNEL = re.compile(r"encoders\.([^.]+)\.pooling_layer\.kernel$")
UNUSED = re.compile(r"encoders\.[^.]+\.resnet_backbone\.fc\.")  # torchvision's head, which RLinf's files hold


@dataclass(frozen=True)
class LoadedClassifier:
    """A classifier in eval mode without gradients; `described` if its file has a config."""

    model: FrameClassifier
    config: ClassifierConfig
    described: bool
    path: Path


def save_classifier(path: Path | str, model: FrameClassifier, config: ClassifierConfig) -> None:
    """Write weights and config atomically as safetensors, whatever the suffix; ConfigError if that is impossible."""
    path = Path(path)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
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
    weights = {} if path.is_dir() else read_weight_file(path)
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
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # no memory for sizes that a config merely claims
        model = FrameClassifier(config)
    load_exactly(model, weights, str(path))
    model = model.to(parse_device(device)).to(memory_format=torch.channels_last)  # faster convolutions
    return LoadedClassifier(model.eval().requires_grad_(False), config, described, path)


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


def _infer_config(path: Path, weights: Mapping[str, Tensor], image_size: Sequence[int] | None) -> ClassifierConfig:
    keys = [match[1] for name in weights if (match := KERNEL.match(name))]
    names = [f"encoders.{key}.{layer}" for key in keys[:1] for layer in ("pooling_layer.kernel", "mlp.0.weight")]
    sides = [weights[name].dim() for name in names if name in weights]
    if sides != [4, 2]:
        lacking = " and ".join(names) or "encoders.*.pooling_layer.kernel"
        raise CheckpointError(f"{path} has no {lacking}: it is no frame classifier.")
    kernel, width = (weights[name] for name in names)
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
