"""Settings of `vlmrm frames collect` and `train`; importing them needs neither torch nor a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vlmrm.errors import ConfigError
from vlmrm.settings import Strict, describe_errors

Architecture = Literal["resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
Pooling = Literal["spatial", "mean", "average"]
Size = tuple[int, int, int]  # [C,H,W]
Crop = dict[str, tuple[float, float, float, float]]  # [left, top, right, bottom] by camera; shares if none is above 1
IMAGE_KEY = "base_camera"  # the default name of the only camera
RENDER = "render"  # the camera that is the environment's own drawing
IMAGE_SIZE: Size = (3, 64, 64)


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], refusal: str) -> None:
    """Raise ConfigError, `refusal` about the settings that are not as before."""
    if differing := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        raise ConfigError(
            refusal.format(", ".join(f"{name} {before.get(name)!r}, not {now.get(name)!r}" for name in differing))
        )


def _option(description: str, default: Any = ..., **bounds: Any) -> Any:
    """Return a field of which `--help` prints the description."""
    return Field(default, description=description, **bounds)


class RewardModelSettings(Strict):
    """`reward_model`: a trained classifier, and how its probabilities become a policy's rewards.

    Values that describe the classifier must be those of its checkpoint, but for the path of its encoder.
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
    hold: int = Field(1, ge=1)  # a binary reward needs this many successes in a row
    accept_unqualified: bool = False  # use a classifier even if its held-out figures do not qualify it
    device: str | None = None  # default: the GPU if there is one

    @model_validator(mode="after")
    def _check_hold(self) -> RewardModelSettings:
        if self.hold > 1 and self.reward_type != "binary":
            raise ValueError(f"hold is {self.hold}, and a {self.reward_type} reward has no successes to hold")
        return self


class DataCollectionSettings(Strict):
    """`data_collection`: the arguments of `RewardDataCollector`."""

    positive_dir: Path = _option("Folder of episodes with a success.", Path("./reward_data/positive"))
    negative_dir: Path = _option("Folder of the others.", Path("./reward_data/negative"))
    image_keys: list[str] | None = _option("Names of the cameras. Default: those of reward_model.", None, min_length=1)
    max_positive_trajectories: int | None = _option("Limit of positive_dir.", None, ge=0)
    max_negative_trajectories: int | None = _option("Limit of negative_dir.", None, ge=0)
    crop: Crop = Field(default_factory=dict)  # the part of a camera's frame that is kept

    def folders(self) -> dict[str, Any]:
        """Return the folders and their limits, as `RewardDataCollector` takes them."""
        return self.model_dump(exclude={"image_keys", "crop"})

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

    `success` is `info.KEY`, `terminated`, a threshold (`reward >= 1`, `info.KEY > 0.9`, `observation.KEY < 0.1`), or a
    `module:function(observation, reward, terminated, truncated, info)`. Simulators with a scripted policy have theirs.
    """

    env: str = _option("An id of Gymnasium, module:id if a module registers it, or module:function that makes one.")
    env_options: dict[str, Any] = Field(default_factory=dict)  # keywords of the environment
    success: str | None = _option("info.KEY, a threshold such as 'reward >= 1', or module:function.", None)


class CollectSettings(EnvironmentSettings):
    """An environment, the policy that plays it, and where the episodes are stored."""

    episodes: int = _option("Episodes to play.", 100, ge=1)
    num_envs: int = _option("Environments that are played side by side.", 8, ge=1)
    policy: str = _option("scripted, random, or module:function from observations [N] to actions [N].", "scripted")
    noise: float = _option("Share of the scripted policy's actions at random.", 0.3, ge=0, le=1)
    max_steps: int = _option("Steps of an episode.", 200, ge=1)
    stop_at_success: bool = _option("End an episode at its first success; else more frames show the task done.", False)
    seed: int = _option("Processes that share folders need different ones.", 0, ge=0)
    reward: FrameRewardSettings = Field(default_factory=FrameRewardSettings)


class Limits(Strict, frozen=True):
    """What is asked of a reward on held-out episodes, and how late their labels may be."""

    max_false_fires: float = _option(
        "Share of failed episodes with a frame above the threshold: 95 % sure not to be exceeded.", 0.5, gt=0, lt=1
    )
    min_precision: float = _option("Least share of successes in the frames above the threshold.", 0.9, ge=0, le=1)
    ignore_around: int = _option("Steps beside a success in which failures do not count: labels are late.", 5, ge=0)

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(f"{describe_errors(error.errors(), type(self), values=True)}.") from None


class TrainSettings(Limits, frozen=True):
    """The data that a classifier is trained on, its architecture and its optimisation."""

    positive_dir: Path = _option("Folder of positive trajectories.")
    negative_dir: Path = _option("Folder of negative trajectories.")
    output_checkpoint: Path = _option("File to write: safetensors, whatever its suffix.")
    pretrained_encoder_path: Path | None = _option(
        "Initial weights of the backbone, by torchvision's names: safetensors, or a .pt of tensors.", None
    )
    backbone: Architecture = _option("A ResNet.", "resnet10")
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
    balance: Literal["weights", "none"] = _option("Make successes count as much as failures.", "weights")
    patience: int = _option("Stop after this many epochs without a lower loss on the held-out frames.", 10, ge=1)
    num_workers: int = _option("Processes that read frames.", 0, ge=0)
    use_cpu: bool = _option("Leave GPUs alone.", False)

    @model_validator(mode="after")
    def _check_backbone(self) -> TrainSettings:
        if self.freeze_encoder and self.pretrained_encoder_path is None:
            raise ValueError("freeze_encoder without pretrained_encoder_path keeps random weights: give the path")
        return self

    @property
    def frozen(self) -> bool:
        """True if the encoder keeps its weights."""
        return self.pretrained_encoder_path is not None if self.freeze_encoder is None else self.freeze_encoder
