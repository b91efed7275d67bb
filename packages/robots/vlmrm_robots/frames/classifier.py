"""Classifiers of success in frames: a ResNet for each camera with a small head; frames to the logit of a success.

Weights have the names of RLinf's `BinaryRewardClassifier`, and the backbones those of torchvision's ResNets, so that
those load. Learned spatial pooling: SERL (Luo et al. 2024), after Levine et al. 2016.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from vlmrm.errors import ConfigError
from vlmrm.settings import validate
from vlmrm.weights import load_exactly, plain_weights, read_weight_file
from vlmrm_robots.frames.settings import Architecture, Crop, Pooling, Size

STRIDE = 32  # pixels to a cell of the backbone's feature map
DROPOUT = 0.1
LAYERS = {
    "resnet10": (BasicBlock, [1, 1, 1, 1]),
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, [3, 4, 23, 3]),
    "resnet152": (Bottleneck, [3, 8, 36, 3]),
}
PREFIXES = re.compile(
    r"^(?:module\.|_orig_mod\.|model\.|backbone\.|resnet_backbone\.)+"
)  # of weight names, by wrappers
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ClassifierConfig(BaseModel):
    """Everything that makes a `FrameClassifier`, and the provenance and figures of a trained one."""

    # Not "forbid": files of earlier versions say reward_model and prompt.
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), ser_json_inf_nan="constants")

    architecture: Architecture = "resnet10"
    image_keys: tuple[str, ...] = Field(min_length=1, max_length=64)  # the cameras, in the order of the head's inputs
    image_size: Size
    crop: Crop = Field(default_factory=dict)  # the part of a camera's frame that was scaled to that size
    hidden_dim: int = Field(256, ge=1)  # width of each encoder's output and of the head
    num_spatial_blocks: int = Field(8, ge=1)  # learned maps that pool each channel
    pooling: Pooling = "spatial"  # learned, of the feature map or of its mean; "average" is that mean, no map learned
    max_pool: Literal["centred", "same"] = "centred"  # padded all around, or right and below, as LeRobot's resnet10
    use_pretrain: bool = False  # the encoder began from pretrained weights,
    freeze_encoder: bool = False  # and kept them
    normalisation: Literal["unit", "imagenet"] = "unit"  # pixels in [0, 1], or standardised as torchvision does
    threshold: float = Field(0.5, ge=0, le=1)  # on the probability, above which a frame is a success
    data_fingerprint: str | None = None
    episodes: tuple[str, ...] = ()  # short digests of those that it was trained on or chosen by
    environment: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)  # on the validation frames
    qualified: bool | None = None  # the metrics qualify it as a reward; None if nobody has measured it
    unqualified_because: str | None = None
    version: Literal[1] = 1

    @field_validator("image_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(keys)) != len(keys):
            raise ValueError("a camera is named twice")
        if unusable := [key for key in keys if not key or "." in key]:  # a key of nn.ModuleDict has no dot
            raise ValueError(f"{unusable[0]!r} is no name of a camera: it needs letters and no dot")
        return keys

    @field_validator("image_size")
    @classmethod
    def _check_size(cls, size: Size) -> Size:
        if size[0] not in (1, 3) or min(size) < 1:
            raise ValueError(f"{list(size)} is no [C,H,W] with 1 or 3 channels")
        return size


def classifier_config(**values: object) -> ClassifierConfig:
    """Return a config of these values; ConfigError names the first invalid one."""
    return validate(ClassifierConfig, values, "the classifier")


def model_input(frames: Tensor, device: torch.device) -> Tensor:
    """Return uint8 frames as a model takes them: float32 in [0, 1], on its device."""
    return frames.to(device, non_blocking=True).float() / 255


class FrameClassifier(nn.Module):
    """A ResNet for each camera and a head over them, with random weights; ConfigError if a config cannot be."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: ClassifierConfig):
        super().__init__()
        if config.freeze_encoder and not config.use_pretrain:
            raise ConfigError("freeze_encoder without pretrained weights keeps random ones: give pretrained weights.")
        if config.normalisation == "imagenet" and config.image_size[0] != 3:
            channels = config.image_size[0]
            raise ConfigError(f"images of {channels} channel have no ImageNet normalisation: use resnet10.")
        self.spec = config
        self.encoders = nn.ModuleDict({key: Encoder(config) for key in config.image_keys})
        hidden = config.hidden_dim
        first = nn.Linear(sum(encoder.width for encoder in self._encoders()), hidden)
        if config.pooling == "average":
            between = [nn.ReLU(), nn.Dropout(DROPOUT)]
        else:
            between = [nn.Dropout(DROPOUT), nn.LayerNorm(hidden), nn.ReLU()]
        self.classifier = nn.Sequential(first, *between, nn.Linear(hidden, 1))
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if config.normalisation == "imagenet" else (0.0, 1.0)
        # No part of a checkpoint, so real even where the weights are on the meta device until they are loaded.
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, device="cpu").reshape(-1, 1, 1), persistent=False)
        if config.freeze_encoder:
            for encoder in self._encoders():
                encoder.resnet_backbone.requires_grad_(False)

    def forward(self, images: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B] of float images [B,C,H,W] in [0, 1] by camera."""
        features = []
        for key, encoder in zip(self.spec.image_keys, self._encoders(), strict=True):
            if key not in images:
                looked = f"the classifier looks at {list(self.spec.image_keys)}"
                raise ConfigError(f"{looked}, and the images are {list(images)}.")
            size = list(images[key].shape[1:])
            if size != list(self.spec.image_size):
                wanted = f"the classifier is for frames {list(self.spec.image_size)}"
                raise ConfigError(f"{wanted}, and those of {key} are {size}.")
            features.append(encoder((images[key].to(self.mean.dtype) - self.mean) / self.std))
        return self.classifier(torch.cat(features, dim=-1)).squeeze(-1)

    @property
    def head(self) -> nn.Linear:
        """The layer of the logits."""
        return self.classifier[-1]  # ty: ignore[invalid-explicit-return]

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def load_encoder(self, path: Path) -> None:
        """Load a pretrained ResNet, by torchvision's names, into every camera's backbone, without its last layer."""
        weights = plain_weights(path, read_weight_file(path))
        named = {PREFIXES.sub("", name): value for name, value in weights.items()}
        named = {name: value for name, value in named.items() if not name.startswith("fc.")}
        for encoder in self._encoders():
            own = {name: value.clone() for name, value in named.items()}  # cameras do not share weights
            load_exactly(encoder.resnet_backbone, own, str(path))

    def _encoders(self) -> list[Encoder]:
        return [encoder for encoder in self.encoders.values() if isinstance(encoder, Encoder)]


class Encoder(nn.Module):
    """One camera's frames to features [B, width]."""

    def __init__(self, config: ClassifierConfig):
        super().__init__()
        self.resnet_backbone = Backbone(config)
        channels = self.resnet_backbone.channels
        height, width = (-(-side // STRIDE) for side in config.image_size[1:])
        self.pooling = config.pooling
        self.width = channels if config.pooling == "average" else config.hidden_dim
        if config.pooling == "average":
            return
        self.pooling_layer = SpatialLearnedEmbeddings(
            channels, *((1, 1) if config.pooling == "mean" else (height, width)), config.num_spatial_blocks
        )
        self.dropout = nn.Dropout(DROPOUT)
        self.mlp = nn.Sequential(
            nn.Linear(channels * config.num_spatial_blocks, config.hidden_dim),
            nn.LayerNorm(config.hidden_dim),
            nn.Tanh(),
        )

    def forward(self, frames: Tensor) -> Tensor:
        feature_map = self.resnet_backbone(frames)
        if self.pooling == "average":
            return feature_map.mean((2, 3))
        if self.pooling == "mean":
            feature_map = feature_map.mean((2, 3), keepdim=True)
        return self.mlp(self.dropout(self.pooling_layer(feature_map)))


class Backbone(ResNet):
    """A ResNet without its head: frames [B,C,H,W] to a feature map [B, channels, H / 32, W / 32]."""

    def __init__(self, config: ClassifierConfig):
        block, layers = LAYERS[config.architecture]
        norm: Any = partial(nn.GroupNorm, 4 if config.architecture == "resnet10" else 32)
        if config.architecture != "resnet10" and config.use_pretrain:
            norm = FrozenBatchNorm2d  # batch statistics would make a frame's score depend on its batch
        super().__init__(block, layers, norm_layer=norm)
        self.channels = 512 * block.expansion
        del self.fc, self.avgpool
        if config.max_pool == "same":
            self.maxpool = nn.Sequential(nn.ConstantPad2d((0, 1, 0, 1), float("-inf")), nn.MaxPool2d(3, 2))
        if config.image_size[0] != 3:
            self.conv1 = nn.Conv2d(config.image_size[0], 64, 7, stride=2, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class SpatialLearnedEmbeddings(nn.Module):
    """Σ over positions of feature[c] · kernel[c, position, f]: [B,C,h,w] to [B, C·F], F learned maps a channel."""

    def __init__(self, channels: int, height: int, width: int, features: int):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(channels, height, width, features) / (height * width) ** 0.5)

    def forward(self, feature_map: Tensor) -> Tensor:
        return torch.einsum("bchw,chwf->bcf", feature_map, self.kernel).flatten(1)
