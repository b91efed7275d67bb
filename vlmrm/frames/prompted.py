"""A reward model of this project as a classifier of frames: it is asked whether the task is done.

Only differences of its scores mean something, so both answers are scored after one prompt, and the margin of the
positive one is what a Bradley-Terry model says of it: P(done) = σ(weight · (score("Yes.") - score("No.")) + bias).
Training fits the weight and the bias; the reward model is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from vlmrm.conversation import Image, Message
from vlmrm.errors import ConfigError
from vlmrm.frames.classifier import FrameClassifier, checked_images
from vlmrm.frames.classifier_config import ClassifierConfig

ANSWERS = ("Yes.", "No.")


class PromptedClassifier(FrameClassifier):
    """`encode` gives margins [B, 1]. The reward model itself is no part of the weights: its path is in the config."""

    def __init__(self, config: ClassifierConfig):
        from vlmrm.scoring import load_scorer

        super().__init__()
        if config.reward_model is None:
            raise ConfigError("the architecture reward_model needs the path of one: give reward_model.")
        if not config.freeze_encoder:
            raise ConfigError("the reward model of a classifier is not trained by frames: it needs freeze_encoder.")
        self.config = config
        self.scorer = load_scorer(config.reward_model)
        self.classifier = nn.Linear(1, 1)
        nn.init.ones_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def encode(self, images: Mapping[str, Tensor]) -> Tensor:
        groups = [
            (self._question(moment), ANSWERS) for moment in zip(*checked_images(self.config, images), strict=True)
        ]
        scores = torch.tensor(self.scorer.score_groups(groups), dtype=torch.float32)
        return (scores[:, :1] - scores[:, 1:]).to(self.device)

    def decide(self, encoded: Tensor) -> Tensor:
        return self.classifier(encoded.to(self.classifier.weight.dtype)).squeeze(-1)

    @torch.no_grad()
    def add_bias(self, logits: float) -> None:
        self.classifier.bias.add_(logits)

    def _question(self, frames: tuple[Tensor, ...]) -> Message:
        pictures = (Image(to_pil_image(frame.float().cpu())) for frame in frames)
        return Message.of("user", *pictures, self.config.prompt)
