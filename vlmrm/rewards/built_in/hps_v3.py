"""`HPSv3`: human preference of an image for a prompt, by a Qwen2-VL-7B that also estimates its uncertainty."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from qwen_vl_utils import fetch_image
from torch import nn

from vlmrm.conversation import Image as ImagePart
from vlmrm.errors import CheckpointError
from vlmrm.modeling.published_weights import read_weights, shared
from vlmrm.rewards.built_in.reward_tokens import RewardTokenReader, published_template, question
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput, Verdict

FILE = "HPSv3.safetensors"
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28  # of every image, in the published configuration; its sides are multiples of 28


class HPSv3(PointwiseRewardModel):
    """μ of the normal distribution N(μ, σ) of an image's score (Ma et al. 2025, HPSv3); log σ goes to the audit log.

    Qwen2-VL-7B reads the image and an instruction that contains the prompt and the token `<|Reward|>`, at which a head
    of three layers reads μ and log σ.
    """

    required_fields = ("prompt", "image")
    text_prompts = True
    options = ("template_file", "model_name_or_path", "base_name_or_path")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        self.template = published_template(config, "hpsv3", TOKEN)
        path = str(config.extra_kwargs.get("model_name_or_path", "MizzenAI/HPSv3"))
        base = str(config.extra_kwargs.get("base_name_or_path", "Qwen/Qwen2-VL-7B-Instruct"))
        self.reader = shared(_load, path, base, self.dtype, self.device)
        self.model = self.reader.model

    def __call__(  # ty: ignore[incompatible-method-override]
        self, prompt: list[str], image: list[Image.Image]
    ) -> RewardModelOutput:
        limits: Any = {"min_pixels": PIXELS, "max_pixels": PIXELS}
        questions = [
            question(ImagePart(fetch_image({"image": picture, **limits})), self.template, text)
            for text, picture in zip(prompt, image, strict=True)
        ]
        return RewardModelOutput.of(self.reader.verdicts(questions, self.config.batch_size, _verdict))


def _verdict(numbers: list[list[float]]) -> Verdict:
    [[mu, log_sigma]] = numbers
    return Verdict(mu, {"log_sigma": log_sigma})


def _load(path: str, base: str, dtype: torch.dtype, device: torch.device) -> RewardTokenReader:
    weights = read_weights(path, FILE)
    weights = weights.get("model", weights)
    first = weights.get("rm_head.0.weight")
    if first is None:
        raise CheckpointError(f"{path} has no rm_head: it is not HPSv3's weight file.")
    head = nn.Sequential(
        nn.Linear(first.shape[1], 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    return RewardTokenReader(weights, base, [TOKEN], head, f"{FILE} of {path}", dtype, device)
