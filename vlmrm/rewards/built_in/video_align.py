"""`VideoAlign`: visual quality, motion quality and text alignment of a video, by Qwen2-VL-2B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from torch import nn
from torchvision.transforms.functional import InterpolationMode, pil_to_tensor, resize

from vlmrm.conversation import Video, VideoOptions
from vlmrm.errors import CheckpointError, ConfigError, MediaError, RewardError
from vlmrm.modeling.manifest import read_json_of
from vlmrm.modeling.published_weights import lora_merged, lora_scale, read_weights, shared
from vlmrm.rendering import ProcessedMedia, Renderer
from vlmrm.rewards.built_in.reward_tokens import RewardTokenReader, published_template, question
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput, Verdict, choice

CONFIG, FILE = "model_config.json", "checkpoint-11352/model.pth"
DIMENSIONS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{dimension}_reward|>" for dimension in DIMENSIONS)
MIN_PIXELS = 128 * 28 * 28  # of a frame, in the published code
MIN_FRAMES, MAX_FRAMES = 4, 768


class VideoAlign(PointwiseRewardModel):
    """VQ + MQ + TA, each (s - mean) / std by the checkpoint's own figures (Liu et al. 2025, VideoAlign / VideoReward).

    Qwen2-VL-2B reads frames of the video and an instruction that contains the prompt and a token for each dimension;
    one linear head reads a number at each token. LoRA weights are merged on loading.
    """

    required_fields = ("prompt", "video")
    text_prompts = True
    options = (
        *("video_fps", "template_file", "dimension"),
        *("model_name_or_path", "weights_name", "base_name_or_path"),
    )

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        extra = config.extra_kwargs
        self.template = published_template(config, "videoalign", *TOKENS)
        self.dimension = choice(config, "dimension", "overall", ("overall", *DIMENSIONS))
        self.video_fps = extra.get("video_fps")
        if self.video_fps is not None and not _is_rate(self.video_fps):
            raise ConfigError(
                f"reward {config.name}: video_fps is {self.video_fps!r}: write the frames a second of the videos."
            )
        path = str(extra.get("model_name_or_path", "KwaiVGI/VideoReward"))
        name = str(extra.get("weights_name", FILE))
        base = str(extra.get("base_name_or_path", "Qwen/Qwen2-VL-2B-Instruct"))
        self.published = _published(path)
        self.reader = shared(_load, path, name, base, self.dtype, self.device)
        self.model = self.reader.model

    def __call__(  # ty: ignore[incompatible-method-override]
        self, prompt: list[str], video: list[list[Image.Image]], fps: list[float] | None = None
    ) -> RewardModelOutput:
        rates: list[Any] = fps or [self.video_fps] * len(prompt)
        if not all(map(_is_rate, rates)):
            raise RewardError("the frame rate of its video is unknown: set video_fps, or give a column fps.")
        data = self.published["data_config"]
        limits = {"min_pixels": MIN_PIXELS, "max_pixels": data["max_frame_pixels"]}
        questions = []
        for text, clip, rate in zip(prompt, video, rates, strict=True):
            frames: Any = sampled(clip, rate, data["fps"])
            questions.append(question(Video(frames, VideoOptions(**limits)), self.template, text))
        return RewardModelOutput.of(self.reader.verdicts(questions, self.config.batch_size, self._verdict))

    def _verdict(self, numbers: list[list[float]]) -> Verdict:
        norm = self.published["inference_config"]
        scores = {
            name: (number - norm[f"{name}_mean"]) / norm[f"{name}_std"]
            for name, [number] in zip(DIMENSIONS, numbers, strict=True)
        }
        return Verdict({**scores, "overall": sum(scores.values())}[self.dimension], scores)


class FrameRenderer(Renderer):
    """Renders frames as the published code renders a video file's: resized once, sides multiples of 28.

    qwen-vl-utils resizes lists of frames to multiples of 56 first.
    """

    def _process_video(self, medium: Video, key: str) -> ProcessedMedia:
        clip: Any = medium.reference
        limits = medium.options
        if len({frame.size for frame in clip}) > 1:
            raise MediaError("the frames of its video have different sizes: resize them to one")
        frames = torch.stack([pil_to_tensor(frame) for frame in clip])
        height, width = smart_resize(
            *frames.shape[-2:], factor=28, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
        )
        frames = resize(frames, [height, width], InterpolationMode.BICUBIC, antialias=True)
        metadata = {"fps": 2.0, "frames_indices": list(range(len(clip))), "total_num_frames": len(clip)}
        options = {
            "video_metadata": [metadata],
            "do_sample_frames": False,
            "return_metadata": True,
            "do_resize": False,
        }
        return self._process_one(frames, clip, key, "video", options)


def sampled(clip: Sequence[Image.Image], video_fps: float, fps: float) -> list[Image.Image]:
    """Return an even number of frames of `clip`, at least 4, `fps` of them a second, evenly spaced from first to last.

    As the published code samples a file; but a video of one frame, which that code refuses, is returned unchanged.
    """
    most = min(MAX_FRAMES, len(clip)) // 2 * 2
    count = round(min(max(len(clip) / video_fps * fps, MIN_FRAMES), most) / 2) * 2
    if count < 2:
        return list(clip)
    return [clip[index] for index in torch.linspace(0, len(clip) - 1, count).round().long().tolist()]


def _is_rate(fps: Any) -> bool:
    return isinstance(fps, (int, float)) and not isinstance(fps, bool) and fps > 0


def merged(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Return PEFT's weights W, A and B as W + scale · BA, under the names of the model without LoRA."""
    merged_weights = {}
    for name, value in weights.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        stem, _, kind = name.rpartition(".base_layer.")
        if f"{stem}.lora_A.default.weight" in weights and kind == "weight":
            value = lora_merged(
                value.float(), *(weights[f"{stem}.lora_{part}.default.weight"] for part in "AB"), scale
            )
        merged_weights[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = value
    return merged_weights


def _published(path: str) -> dict[str, Any]:
    """Return `model_config.json`; raise CheckpointError when it is missing."""
    config = read_json_of(path, CONFIG)
    if config is None:
        raise CheckpointError(f"there is no {CONFIG} in {path}: give the folder or repository that has it.")
    return config


def _load(path: str, name: str, base: str, dtype: torch.dtype, device: torch.device) -> RewardTokenReader:
    lora = _published(path)["peft_lora_config"]
    scale = lora_scale(lora["lora_r"], lora["lora_alpha"], lora.get("use_rslora"))
    weights = merged(read_weights(path, name), scale)
    if "rm_head.weight" not in weights:
        raise CheckpointError(f"{name} of {path} has no rm_head: it is not VideoAlign's weight file.")
    head = nn.Linear(weights["rm_head.weight"].shape[1], 1, bias=False)
    return RewardTokenReader(weights, base, TOKENS, head, f"{name} of {path}", dtype, device, FrameRenderer)
