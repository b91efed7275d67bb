"""`aesthetic`: how beautiful people find an image, by CLIP and a small head that LAION trained on their ratings."""

from __future__ import annotations

import torch
from accelerate import Accelerator, PartialState
from PIL import Image
from torch import nn

from vlmrm.errors import ConfigError
from vlmrm.modeling.published_weights import load_exactly, read_weights, shared
from vlmrm.rewards.built_in.clip import CLIP, load_towers
from vlmrm.rewards.built_in.views import FRAMES, views_of
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput, choice

WIDTHS = (1024, 128, 64, 16, 1)  # of the head's layers, without activations between them
PREFIX = "layers."
DROPOUTS = 3  # after the first layers; they do nothing here, and their numbers are in the names of the weights


class Aesthetic(PointwiseRewardModel):
    """About 1 to 10, the rating that people would give (Schuhmann et al. 2022, arXiv:2210.08402; LAION's predictor).

    Linear layers over the direction of CLIP's image embedding, as DDPO and Flow-GRPO use them. The head computes in
    float32, whatever `dtype` is.

    Settings:
        head_path: the head's weight file, such as `sac+logos+ava1-l14-linearMSE.pth`.
        model_name_or_path: the CLIP checkpoint that the head belongs to, ViT-L/14 of OpenAI.
        video_frames: `mean` over all frames of a video, or the `first`.

    Raises:
        ConfigError: without a `head_path`.
        CheckpointError: when the weights are not those of such a head.
    """

    required_fields = ()
    options = ("head_path", "model_name_or_path", "video_frames")

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        head = config.extra_kwargs.get("head_path")
        if not head:
            raise ConfigError(f"reward {config.name}: head_path is missing: give the file of the head's weights.")
        self.frames = choice(config, "video_frames", "mean", FRAMES)
        path = str(config.extra_kwargs.get("model_name_or_path", CLIP.published))
        self.towers = shared(load_towers, path, path, self.dtype, self.device)
        self.model = self.towers.model
        self.head = load_head(str(head), self.model.config.projection_dim)

    @torch.inference_mode()
    def __call__(  # ty: ignore[incompatible-method-override]
        self, image: list[Image.Image] | None = None, video: list[list[Image.Image]] | None = None
    ) -> RewardModelOutput:
        views = views_of(image, video, self.frames)
        pictures = [picture for view in views for picture in view]
        ratings = self.head(self.towers.image_directions(pictures, self.config.batch_size)).squeeze(-1)
        parts = ratings.split([len(view) for view in views])
        return RewardModelOutput([float(part.mean()) for part in parts])


def load_head(path: str, width: int) -> nn.Sequential:
    """Return the head over embeddings of so many numbers, in float32."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip((width, *WIDTHS), WIDTHS, strict=False)):
        layers += [nn.Linear(inputs, outputs), *([nn.Identity()] if number < DROPOUTS else [])]
    head = nn.Sequential(*layers)
    load_exactly(head, {name.removeprefix(PREFIX): weight for name, weight in read_weights(path).items()}, path)
    return head.float().eval()
