"""`frame_success`: does the last frame show that the task is done? A classifier trained with `vlmrm frames train`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput
from vlmrm.rewards.samples import to_tensor
from vlmrm.settings import validate
from vlmrm_robots.frames.frame_reward import FrameScorer
from vlmrm_robots.frames.images import as_frames, fitted
from vlmrm_robots.frames.settings import RewardModelSettings
from vlmrm_robots.rewards.trajectory_model import frames_of_samples


class FrameSuccess(PointwiseRewardModel):
    """1 if an image's probability of success is above the checkpoint's threshold, else 0; or that probability.

    Of a video, or of an answer of several images, it is that of the last frame. An image of another size than the
    classifier's frames fails: nothing is resized implicitly. A classifier that was trained on a crop takes whole
    pictures, which are cut and scaled as its frames were.

    Settings:
        checkpoint_path: the classifier, of one camera.
        reward_type: `binary` (default) or `continuous`.
        image_size: [C,H,W], for a checkpoint without it.
        threshold: of a success, in place of the checkpoint's.
        accept_unqualified: use a classifier even if its held-out figures do not qualify it.
    """

    required_fields = ()  # an image, a video, or a response of images
    use_tensor_inputs = True
    message_responses = True
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
            several = f"{settings.checkpoint_path} looks at {', '.join(cameras)} at once"
            raise ConfigError(f"reward {config.name}: {several}, and a sample has the pictures of one: train for one.")
        self.model = self.scorer.model if self.dtype == "auto" else self.scorer.model.to(self.dtype)

    # Without **kwargs, so that no other columns are gathered from other ranks.
    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[Any],
        image: list[Tensor] | None = None,
        video: list[Tensor] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        config = self.scorer.config
        usable: dict[int, Tensor] = {}
        found, failures = frames_of_samples(len(prompt), image, video, response, to_tensor)
        for i, frames in found.items():
            try:
                usable[i] = self._fitted(frames[-1])
            except RowError as error:
                failures[i] = error.reason
            except DataError as error:
                failures[i] = str(error).rstrip(".")
        probabilities = [0.0] * len(prompt)
        if usable:
            scored = self.scorer.probabilities({config.image_keys[0]: torch.stack([*usable.values()])})
            for i, value in zip(usable, scored.tolist(), strict=True):
                probabilities[i] = value
        rewards = [float(value > config.threshold) for value in probabilities] if self.binary else probabilities
        return RewardModelOutput(rewards, {"probability": probabilities}, failures=failures)

    def _fitted(self, image: Tensor) -> Tensor:
        """Return an image in the size of the classifier's frames, cut as they were."""
        config, key = self.scorer.config, self.scorer.config.image_keys[0]
        size, found = list(config.image_size), image
        if config.crop:
            frames = as_frames(image, "its image")
            found = torch.from_numpy(fitted(frames, config.image_size, config.crop.get(key), "its image")[0])
        if list(found.shape) != size:
            raise RowError(f"its image is {list(image.shape)}, and the classifier is for {size}: give it in that size")
        return found
