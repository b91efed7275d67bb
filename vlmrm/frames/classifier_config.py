"""What a frame classifier is: its architecture, its frames, its threshold, and where it comes from."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vlmrm.frames.choices import QUESTION, Architecture, Pooling
from vlmrm.settings import checked


class ClassifierConfig(BaseModel):
    """Everything that `build_classifier` needs, and what is worth knowing of a trained one; kept in its checkpoint.

    Attributes:
        architecture: a ResNet, or `reward_model`: a model trained with vlmrm that is asked `prompt`.
        image_keys: the cameras, in the order in which the head sees them.
        image_size: [C,H,W] of every camera's frames.
        hidden_dim: width of each encoder's output and of the head.
        num_spatial_blocks: learned maps that each channel is pooled with.
        pooling: `spatial` pools the map of features; `mean` takes its mean first, and where things are is lost.
        use_pretrain: the encoder began from pretrained weights.
        freeze_encoder: it kept them.
        normalisation: `unit` takes pixels in [0, 1] as they are; `imagenet` standardises them as torchvision does.
        reward_model, prompt: of the architecture `reward_model`.
        threshold: a frame is a success where its probability is above it.
        data_fingerprint, environment: what it was trained on.
        metrics: figures on the validation frames.
        qualified: whether these figures show that it tells successes from failures, as a reward must; None where
            nobody has looked.
        unqualified_because: why they do not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), ser_json_inf_nan="constants")

    architecture: Architecture = "resnet10"
    image_keys: tuple[str, ...] = Field(min_length=1)
    image_size: tuple[int, int, int]
    hidden_dim: int = Field(256, ge=1)
    num_spatial_blocks: int = Field(8, ge=1)
    pooling: Pooling = "spatial"
    use_pretrain: bool = False
    freeze_encoder: bool = False
    normalisation: Literal["unit", "imagenet"] = "unit"
    reward_model: str | None = None
    prompt: str = QUESTION
    threshold: float = Field(0.5, ge=0, le=1)
    data_fingerprint: str | None = None
    environment: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    qualified: bool | None = None
    unqualified_because: str | None = None
    version: Literal[1] = 1

    @field_validator("image_keys")
    @classmethod
    def _usable_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(keys)) != len(keys):
            raise ValueError("a camera is named twice")
        if unusable := [key for key in keys if not key or "." in key]:
            raise ValueError(f"{unusable[0]!r} is no name of a camera: it needs letters and no dot")
        return keys

    @field_validator("image_size")
    @classmethod
    def _usable_size(cls, size: tuple[int, int, int]) -> tuple[int, int, int]:
        if size[0] not in (1, 3) or min(size) < 1:
            raise ValueError(f"{list(size)} is no [C,H,W] with 1 or 3 channels")
        return size


def classifier_config(**values: object) -> ClassifierConfig:
    """A config from values by name.

    Raises:
        ConfigError: naming the first value that cannot be.
    """
    return checked(ClassifierConfig, values, "the classifier")
