"""`cosmos_reason1`: a vision-language model's probability that a video shows nothing impossible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from vlmrm.errors import RewardError
from vlmrm.modeling.attention import resolve_attention
from vlmrm.modeling.published_weights import pretrained
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput, Verdict

MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
MOST_FRAMES = 160  # longer videos are subsampled evenly
MOST_TOKENS = 9216  # of a video
LEAST_TOKENS = 16  # of a pair of frames

SYSTEM_PROMPT = """You examine videos for artifacts and anomalies: things that could not happen in the real world.

Look for mistakes in
- gravity: things that float, or fall the wrong way
- collisions: things that pass through each other
- interaction: things that move although nothing moves them
- liquids: flows through what is solid
- permanence: things that appear, vanish or change their shape
- common sense: things that cannot serve their purpose
- causes and effects: effects before or without a cause
- human motion: bodies that deform, joints that bend the wrong way

These are no mistakes: an animated or artistic style, the missing sound, light, shadows, blur and camera effects, and
whatever is only in the background or a matter of taste.

Begin your answer with one word, "Yes" or "No"."""
QUESTION = "Does the video contain any anomalies or artifacts?"


class CosmosReason1(PointwiseRewardModel):
    """exp(no) / (exp(yes) + exp(no)) of the next token when a Qwen2.5-VL is asked for artifacts of a video.

    The reward of cosmos-rl's service for nvidia/Cosmos-Reason1-7B-Reward (arXiv:2503.15558). The default system prompt
    is worded by this project; for the published model's own figures pass the one of its model card as `system_prompt`.

    At most 160 frames are used, an even number, resized to at most 9,216 tokens in all. The frame rate is the column
    `fps`, or the setting. An image is a video of two equal frames.
    """

    required_fields = ("prompt",)
    options = ("model_name_or_path", "question", "system_prompt", "fps")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        path = config.extra_kwargs.get("model_name_or_path", MODEL)
        self.question = config.extra_kwargs.get("question", QUESTION)
        self.system_prompt = config.extra_kwargs.get("system_prompt", SYSTEM_PROMPT)
        self.processor: Any = pretrained(AutoProcessor, path)
        # Flash attention has no float32.
        attention = resolve_attention("sdpa" if self.dtype == torch.float32 else "auto")
        model: Any = pretrained(
            Qwen2_5_VLForConditionalGeneration, path, dtype=self.dtype, attn_implementation=attention
        )
        self.model = model.to(self.device).eval()
        self.yes, self.no = (
            self.processor.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")
        )

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
        fps: list[float] | None = None,
    ) -> RewardModelOutput:
        if (image is None) == (video is None):
            raise RewardError("a sample has both an image and a video, or neither: give it one of them.")
        videos = video if video is not None else [[picture, picture] for picture in image or ()]
        rates = fps or [self.config.extra_kwargs.get("fps")] * len(prompt)
        return RewardModelOutput.each(self._verdict, prompt, videos, rates)

    @torch.no_grad()
    def _verdict(self, prompt: str, frames: Sequence[Image.Image], fps: float | None) -> Verdict:
        """Return the reward of one sample; batches of one, so that no sample affects another."""
        indices, interval = thinned(len(frames))
        if fps is None and len(indices) > 2:
            raise RewardError("the frame rate of its video is unknown: set fps, or give a column fps")
        if fps is not None and not fps > 0:
            raise RewardError(f"its fps is {fps}: write frames a second")
        pixels = resized([frames[index] for index in indices], self.processor.video_processor)
        if "{prompt}" in self.question and not isinstance(prompt, str):
            raise RewardError("its prompt is no text, and the question has {prompt} in it: render it")
        prompt_text = str(prompt) if "{prompt}" in self.question else ""
        for token in self.processor.tokenizer.all_special_tokens:
            if token in prompt_text:
                raise RewardError(f"its prompt holds the control token {token}: remove it")
        question = self.question.replace("{prompt}", prompt_text)
        messages = [
            {"role": "system", "content": [{"type": "text", "text": self.system_prompt}]},
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]},
        ]
        inputs = self.processor(
            text=[self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)],
            videos=[pixels],
            video_metadata=[
                # Two frames are one temporal patch, whatever their rate.
                {
                    "fps": (fps or 2.0) / interval,
                    "total_num_frames": len(indices),
                    "frames_indices": [*range(len(indices))],
                }
            ],
            do_sample_frames=False,
            do_resize=False,
            return_tensors="pt",
        ).to(self.device)
        last = self.model(**inputs, logits_to_keep=1).logits[0, -1].float()
        yes, no = float(last[self.yes]), float(last[self.no])
        reward = float(torch.tensor(no - yes, dtype=torch.float64).sigmoid())
        return Verdict(reward, {"logits": {"yes": yes, "no": no}})


def thinned(frames: int) -> tuple[list[int], int]:
    """Return the indices of the frames to use, an even number of them, and the interval between two."""
    interval = (frames - 1) // MOST_FRAMES + 1
    indices = list(range(0, frames, interval))
    return ([0, 0], 1) if len(indices) == 1 else (indices[: len(indices) // 2 * 2], interval)


def resized(frames: Sequence[Image.Image], processor: Any) -> torch.Tensor:
    """Return the frames as uint8 [T, 3, H, W], resized to the limits for their number."""
    if len({frame.size for frame in frames}) > 1:
        raise RewardError("the frames of its video have different sizes: resize them to one")
    factor = processor.patch_size * processor.merge_size
    pixels_of_token = factor**2 * processor.temporal_patch_size
    try:
        height, width = smart_resize(
            frames[0].height,
            frames[0].width,
            factor=factor,
            min_pixels=LEAST_TOKENS * pixels_of_token,
            max_pixels=MOST_TOKENS * pixels_of_token // len(frames),
        )
    except ValueError as error:
        raise RewardError(f"its frames cannot be resized ({error})") from None
    arrays = [np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC)) for frame in frames]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
