"""Settings of `vlmrm frames collect` and `train`; importing them needs neither torch nor a simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vlmrm.errors import ConfigError
from vlmrm.settings import Strict, describe_errors

Architecture = Literal["resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "reward_model"]
Pooling = Literal["spatial", "mean", "average"]
Size = tuple[int, int, int]  # [C,H,W]
Crop = dict[str, tuple[float, float, float, float]]  # [left, top, right, bottom] by camera; shares if none is above 1
QUESTION = "Is the task done?"  # the default prompt of a reward model
IMAGE_KEY = "base_camera"  # the default name of the only camera
RENDER = "render"  # the camera that is the environment's own drawing
IMAGE_SIZE: Size = (3, 64, 64)


class RewardModelSettings(Strict):
    """`reward_model`: a trained classifier, and how its probabilities become a policy's rewards.

    Values that describe the classifier must be those of its checkpoint. `use_pretrain` only warns where it differs,
    and `pretrained_encoder_path` is not read: the checkpoint has the encoder's weights.
    """

    checkpoint_path: Path | None = None
    image_keys: list[str] | None = Field(None, min_length=1)
    image_size: Size | None = None
    hidden_dim: int | None = None
    num_spatial_blocks: int | None = None
    pretrained_encoder_path: Path | None = None
    use_pretrain: bool | None = None
    freeze_encoder: bool | None = None
    reward_type: Literal["binary", "continuous"] = "binary"  # 1 above the checkpoint's threshold, or the probability
    reward_mode: Literal["per_step", "terminal"] = "per_step"  # terminal: at an episode's last step, 0 before
    reward_weight: float = 1.0  # factor of the learned reward in the sum
    env_reward_weight: float = 0.0  # factor of the environment's own reward
    threshold: float | None = Field(None, ge=0, le=1)  # of a success, in place of the checkpoint's
    smoothing: int = Field(1, ge=1)  # the probability is the mean over this many last frames of the episode
    hold: int = Field(1, ge=1)  # a binary reward needs this many successes in a row
    end_at_success: bool = False  # an episode terminates where the classifier sees a success
    accept_unqualified: bool = False  # use a classifier even if its held-out figures do not qualify it
    device: str | None = None  # default: the GPU if there is one

    @model_validator(mode="after")
    def _check_hold(self) -> RewardModelSettings:
        if self.hold > 1 and self.reward_type != "binary":
            raise ValueError(f"hold is {self.hold}, and a {self.reward_type} reward has no successes to hold")
        return self


class DataCollectionSettings(Strict):
    """`data_collection`: the arguments of `RewardDataCollector`."""

    positive_dir: Path = Path("./reward_data/positive")
    negative_dir: Path = Path("./reward_data/negative")
    image_keys: list[str] | None = Field(None, min_length=1)  # default: those of reward_model
    max_positive_trajectories: int | None = Field(None, ge=0)  # None: no limit
    max_negative_trajectories: int | None = Field(None, ge=0)
    crop: Crop = Field(default_factory=dict)  # the part of a camera's frame that is kept

    @field_validator("crop")
    @classmethod
    def _check_crop(cls, crop: Crop) -> Crop:
        for key, (left, top, right, bottom) in crop.items():
            if not (0 <= left < right and 0 <= top < bottom):
                raise ValueError(
                    f"the crop of {key} is {[left, top, right, bottom]}: it is [left, top, right, bottom]"
                )
        return crop


class FrameRewardSettings(Strict):
    """`reward`, which collection and policy training share: whether to collect frames, and which classifier to use."""

    group_name: str = "RewardGroup"
    use_reward_model: bool = False
    collect_data: bool = False
    reward_model: RewardModelSettings = Field(default_factory=RewardModelSettings)
    data_collection: DataCollectionSettings = Field(default_factory=DataCollectionSettings)

    @model_validator(mode="after")
    def _check_image_keys(self) -> FrameRewardSettings:
        model, collected = self.reward_model.image_keys, self.data_collection.image_keys
        if model and collected and model != collected:
            raise ValueError(f"reward_model.image_keys is {model} and data_collection.image_keys {collected}")
        if unknown := self.data_collection.crop.keys() - set(self.image_keys):
            raise ValueError(f"crop names {sorted(unknown)}, and the image_keys are {self.image_keys}")
        return self

    @property
    def crop(self) -> Crop:
        return self.data_collection.crop

    @property
    def image_keys(self) -> list[str]:
        return self.data_collection.image_keys or self.reward_model.image_keys or [IMAGE_KEY]

    @property
    def image_size(self) -> Size:
        return self.reward_model.image_size or IMAGE_SIZE


class EnvironmentSettings(Strict):
    """Which environment is played, and which of its states are a success.

    Attributes:
        env: an id of Gymnasium, `module:id` if a module registers it, or `module:function` that returns a
            gymnasium.Env.
        env_options: keywords of the environment.
        success: `info.KEY`, `terminated`, a threshold (`reward >= 1`, `info.KEY > 0.9`, `observation.KEY < 0.1`), or
            a `module:function(observation, reward, terminated, truncated, info)`. Simulators with a scripted policy
            have their own.
    """

    env: str
    env_options: dict[str, Any] = Field(default_factory=dict)
    success: str | None = None


class CollectSettings(EnvironmentSettings):
    """An environment, the policy that plays it, and where the episodes are stored."""

    episodes: int = Field(100, ge=1)
    num_envs: int = Field(8, ge=1)
    policy: str = "scripted"  # random, or a module:function from observations [N] to actions [N]
    noise: float = Field(0.3, ge=0, le=1)  # share of random actions
    max_steps: int = Field(200, ge=1)
    stop_at_success: bool = False  # otherwise episodes go on for max_steps, and more frames show the task done
    seed: int = Field(0, ge=0)
    reward: FrameRewardSettings = Field(default_factory=FrameRewardSettings)


def _option(description: str, default: Any = ..., **bounds: Any) -> Any:
    """Return a field of which `vlmrm frames train --help` prints the description."""
    return Field(default, description=description, **bounds)


class TrainSettings(Strict, frozen=True):
    """The data that a classifier is trained on, its architecture and its optimisation."""

    positive_dir: Path = _option("Folder of positive trajectories.")
    negative_dir: Path = _option("Folder of negative trajectories.")
    output_checkpoint: Path = _option("File to write: safetensors, whatever its suffix.")
    pretrained_encoder_path: Path | None = _option(
        "Initial weights of the backbone, by torchvision's names: safetensors, or a .pt of tensors.", None
    )
    backbone: Architecture = _option("A ResNet, or a reward model trained with vlmrm.", "resnet10")
    reward_model: str | None = _option("Of the backbone reward_model: a checkpoint trained with vlmrm.", None)
    prompt: str = _option("The question to that reward model.", QUESTION)
    image_key: tuple[str, ...] = _option("A camera, or several.", (IMAGE_KEY,))
    image_size: Size = _option("C H W of the frames.", IMAGE_SIZE)
    batch_size: int = _option("Frames in a step.", 32, ge=1)
    epochs: int = _option("The most passes over the frames.", 100, ge=1)
    lr: float = _option("Learning rate of Adam.", 1e-4, gt=0)
    hidden_dim: int = _option("Width of the classifier.", 256, ge=1)
    num_spatial_blocks: int = _option("Learned maps that pool each channel of the backbone.", 8, ge=1)
    pooling: Pooling = _option(
        "spatial: of the map; mean: of its mean, which loses positions; average: its mean alone.", "spatial"
    )
    freeze_encoder: bool | None = _option("Train the head alone. Default: if the backbone is pretrained.", None)
    visualize_positive: bool = _option("Write every success as a picture before training.", False)
    vis_output_dir: Path = _option("Folder of those pictures.", Path("positive_samples_vis"))
    val_fraction: float = _option("Share of the trajectories to hold out.", 0.2)
    seed: int = _option("Of the weights, the split, the order and the augmentation.", 0, ge=0)
    balance: Literal["weights", "sampling", "none"] = _option(
        "Make successes count as much as failures, by weights or by sampling; or none.", "weights"
    )
    augment: bool = _option("Shift and recolour the training frames at random.", False)
    patience: int = _option("Stop after this many epochs without a better validation score.", 10, ge=1)
    select_by: Literal["loss", "auc"] = _option(
        "The validation score of the best epoch: loss, or auc, which soon saturates.", "loss"
    )
    target_fpr: float = _option("Share of the held-out failures that may lie above the threshold.", 0.01, ge=0, lt=1)
    max_false_fires: float = _option(
        "Share of failed episodes with a frame above the threshold: 95 % sure not to be exceeded.", 0.5, gt=0, lt=1
    )
    min_precision: float = _option(
        "Share of the frames above the threshold that are successes: 95 % sure not to be less.", 0.9, ge=0, le=1
    )
    num_workers: int = _option("Processes that read frames.", 0, ge=0)
    bf16: bool = _option("Compute in bfloat16.", False)
    report_to: tuple[str, ...] = _option("Trackers, such as tensorboard or wandb.", ())
    use_cpu: bool = _option("Leave GPUs alone.", False)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(f"{describe_errors(error.errors(), type(self), values=True)}.") from None

    @model_validator(mode="after")
    def _check_backbone(self) -> TrainSettings:
        prompted, pretrained = self.backbone == "reward_model", self.pretrained_encoder_path is not None
        if prompted != (self.reward_model is not None):
            raise ValueError("the backbone reward_model and the path reward_model go together: give both or neither")
        if prompted and (pretrained or self.freeze_encoder is False):
            raise ValueError("a reward model is used as it is: leave out pretrained_encoder_path and freeze_encoder")
        if self.freeze_encoder and not (pretrained or prompted):
            raise ValueError("freeze_encoder without pretrained_encoder_path keeps random weights: give the path")
        return self

    @property
    def frozen(self) -> bool:
        """True if the encoder keeps its weights."""
        pretrained = self.pretrained_encoder_path is not None or self.backbone == "reward_model"
        return pretrained if self.freeze_encoder is None else self.freeze_encoder
