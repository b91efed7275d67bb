"""`frame_success`: does the image show that the task is done? A classifier trained with `vlmrm frames train`."""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from vlmrm.errors import ConfigError, DataError
from vlmrm.frames.frame_reward import FrameScorer
from vlmrm.frames.images import as_frames, fitted
from vlmrm.frames.settings import RewardModelSettings
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput
from vlmrm.settings import validate


class FrameSuccess(PointwiseRewardModel):
    """1 if the image's probability of success is above the checkpoint's threshold, else 0; or that probability.

    An image of another size than the classifier's frames fails: nothing is resized implicitly. A classifier that was
    trained on a crop takes whole pictures, which are cut and scaled as its frames were.

    Settings:
        checkpoint_path: the classifier, of one camera.
        reward_type: `binary` (default) or `continuous`.
        image_size: [C,H,W], for a checkpoint without it.
        threshold: of a success, in place of the checkpoint's.
        accept_unqualified: use a classifier even if its held-out figures do not qualify it.
    """

    required_fields = ("image",)
    use_tensor_inputs = True
    default_dtype = "auto"
    options = ("checkpoint_path", "reward_type", "image_size", "threshold", "accept_unqualified")

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        values = {**config.extra_kwargs, "device": str(self.device)}
        settings = validate(RewardModelSettings, values, f"reward {config.name}")
        self.scorer = FrameScorer.open(settings)
        self.binary = settings.reward_type == "binary"
        cameras = self.scorer.config.image_keys
        if len(cameras) != 1:
            raise ConfigError(
                f"reward {config.name}: {settings.checkpoint_path} looks at {', '.join(cameras)} at once, and a "
                "sample has one image: train one with a single image key."
            )
        self.model = self.scorer.model if self.dtype == "auto" else self.scorer.model.to(self.dtype)

    def __call__(self, image: list[Tensor], **kwargs) -> RewardModelOutput:  # ty: ignore[incompatible-method-override]
        config = self.scorer.config
        size = list(config.image_size)
        failures: dict[int, str] = {}
        image = list(image)
        for i, frame in enumerate(image):
            try:
                image[i] = torch.from_numpy(self._cropped(frame)) if config.crop else frame
                if list(image[i].shape) != size:
                    problem = f"its image is {list(frame.shape)}, and the classifier is for {size}"
                    failures[i] = f"{problem}: give it in that size"
            except DataError as error:
                failures[i] = str(error).rstrip(".")
        usable = [i for i in range(len(image)) if i not in failures]
        probabilities = [0.0] * len(image)
        if usable:
            scored = self.scorer.probabilities({config.image_keys[0]: torch.stack([image[i] for i in usable])})
            for i, value in zip(usable, scored.tolist(), strict=True):
                probabilities[i] = value
        rewards = [float(value > config.threshold) for value in probabilities] if self.binary else probabilities
        return RewardModelOutput(rewards, {"probability": probabilities}, failures=failures)

    def _cropped(self, image: Tensor) -> np.ndarray:
        config, key = self.scorer.config, self.scorer.config.image_keys[0]
        frames = as_frames(image, "its image")
        return fitted(frames, config.image_size, config.crop.get(key), "its image")[0]
