"""The settings of `vlmrm frames train`; importing them needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from vlmrm.errors import ConfigError
from vlmrm.frames.choices import IMAGE_KEY, IMAGE_SIZE, QUESTION, Architecture, Pooling
from vlmrm.settings import Strict, first_wrong

Balance = Literal["weights", "sampling", "none"]
SelectBy = Literal["loss", "auc"]


class TrainSettings(Strict, frozen=True):
    """What a classifier is trained on and how.

    Parameters
    ----------
    positive_dir:
        Folder of positive trajectories.
    negative_dir:
        Folder of negative trajectories.
    output_checkpoint:
        File to write: safetensors, whatever its suffix.
    pretrained_encoder_path:
        Weights that the backbone begins from: safetensors, or a .pt of tensors, by torchvision's names.
    backbone:
        A ResNet, or a reward model trained with vlmrm.
    reward_model:
        Of the backbone reward_model: a checkpoint trained with vlmrm.
    prompt:
        What that reward model is asked.
    image_key:
        A camera; several after one another.
    image_size:
        C H W of the frames.
    batch_size:
        Frames in a step.
    epochs:
        At most so many passes.
    lr:
        Learning rate of Adam.
    hidden_dim:
        Width of the classifier.
    num_spatial_blocks:
        Learned maps that each channel of the backbone is pooled with.
    pooling:
        spatial: of the map; mean: of its mean, which forgets where things are.
    freeze_encoder:
        Keep the backbone as it was loaded. Default: where it is loaded.
    visualize_positive:
        Write every success as a picture before training.
    vis_output_dir:
        Folder of those pictures.
    val_fraction:
        Share of the trajectories to hold out.
    seed:
        Of the weights, the split, the order and the augmentation.
    balance:
        Make successes count as much as failures, by weights or by sampling; or none.
    augment:
        Shift and colour the training frames by chance.
    patience:
        Stop after so many epochs without a better validation score.
    select_by:
        The validation score that the best epoch has: loss, or auc, which soon says no more.
    target_fpr:
        Share of held-out failures that the threshold may take for successes.
    num_workers:
        Processes that read frames.
    device:
        Default: the GPU where there is one.
    """

    positive_dir: Path
    negative_dir: Path
    output_checkpoint: Path
    pretrained_encoder_path: Path | None = None
    backbone: Architecture = "resnet10"
    reward_model: str | None = None
    prompt: str = QUESTION
    image_key: tuple[str, ...] = (IMAGE_KEY,)
    image_size: tuple[int, int, int] = IMAGE_SIZE
    batch_size: int = Field(32, ge=1)
    epochs: int = Field(100, ge=1)
    lr: float = Field(1e-4, gt=0)
    hidden_dim: int = Field(256, ge=1)
    num_spatial_blocks: int = Field(8, ge=1)
    pooling: Pooling = "spatial"
    freeze_encoder: bool | None = None
    visualize_positive: bool = False
    vis_output_dir: Path = Path("positive_samples_vis")
    val_fraction: float = 0.2
    seed: int = 0
    balance: Balance = "weights"
    augment: bool = False
    patience: int = Field(10, ge=1)
    select_by: SelectBy = "loss"
    target_fpr: float = Field(0.01, ge=0, lt=1)
    num_workers: int = Field(0, ge=0)
    device: str | None = None

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(f"{first_wrong(error.errors(), type(self), values=True)}.") from None

    @model_validator(mode="after")
    def _of_one_backbone(self) -> TrainSettings:
        asked = self.backbone == "reward_model"
        if asked != (self.reward_model is not None):
            raise ValueError("the backbone reward_model and the path reward_model go together: give both or neither")
        loaded = self.pretrained_encoder_path is not None
        if asked and (loaded or self.freeze_encoder is False):
            raise ValueError("a reward model is used as it is: leave out pretrained_encoder_path and freeze_encoder")
        if self.freeze_encoder and not (loaded or asked):
            raise ValueError("freeze_encoder without pretrained_encoder_path keeps random weights: give the path")
        return self

    @property
    def frozen(self) -> bool:
        """Whether the encoder keeps its weights."""
        loaded = self.pretrained_encoder_path is not None or self.backbone == "reward_model"
        return loaded if self.freeze_encoder is None else self.freeze_encoder
