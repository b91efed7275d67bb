"""The settings of `vlmrm frames train`; importing them needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vlmrm.errors import ConfigError
from vlmrm.frames.choices import IMAGE_KEY, IMAGE_SIZE, QUESTION, Architecture, Pooling

Balance = Literal["weights", "sampling", "none"]
SelectBy = Literal["loss", "auc"]
CHOICES = {"backbone": Architecture, "pooling": Pooling, "balance": Balance, "select_by": SelectBy}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
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
    batch_size: int = 32
    epochs: int = 100
    lr: float = 1e-4
    hidden_dim: int = 256
    num_spatial_blocks: int = 8
    pooling: Pooling = "spatial"
    freeze_encoder: bool | None = None
    visualize_positive: bool = False
    vis_output_dir: Path = Path("positive_samples_vis")
    val_fraction: float = 0.2
    seed: int = 0
    balance: Balance = "weights"
    augment: bool = False
    patience: int = 10
    select_by: SelectBy = "loss"
    target_fpr: float = 0.01
    num_workers: int = 0
    device: str | None = None

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: choose from {', '.join(get_args(choices))}.")
        for name in ("batch_size", "epochs", "patience", "hidden_dim", "num_spatial_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if not self.lr > 0:
            raise ConfigError(f"lr is {self.lr}: it must be above 0.")
        if not 0 <= self.target_fpr < 1:
            raise ConfigError(f"target_fpr is {self.target_fpr}: it is a share from 0 to below 1.")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is {self.num_workers}: it must be at least 0.")
        asked = self.backbone == "reward_model"
        if asked != (self.reward_model is not None):
            raise ConfigError("the backbone reward_model and the path reward_model go together: give both or neither.")
        loaded = self.pretrained_encoder_path is not None
        if asked and (loaded or self.freeze_encoder is False):
            raise ConfigError("a reward model is used as it is: leave out pretrained_encoder_path and freeze_encoder.")
        if self.freeze_encoder and not (loaded or asked):
            raise ConfigError("freeze_encoder without pretrained_encoder_path keeps random weights: give the path.")

    @property
    def frozen(self) -> bool:
        """Whether the encoder keeps its weights."""
        loaded = self.pretrained_encoder_path is not None or self.backbone == "reward_model"
        return loaded if self.freeze_encoder is None else self.freeze_encoder
