"""Qwen2-VLs that read scores at reward tokens in their text: `HPSv3` of images, and `VideoAlign` of videos."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from PIL import Image
from qwen_vl_utils import fetch_image
from qwen_vl_utils.vision_process import smart_resize
from torch import nn
from torchvision.transforms.functional import InterpolationMode, pil_to_tensor, resize
from transformers import AutoConfig, AutoProcessor, Qwen2VLConfig, Qwen2VLModel

from vlmrm.batching import PaddedBatcher, to_device
from vlmrm.conversation import Conversation, Medium, Message, Video, VideoOptions
from vlmrm.conversation import Image as ImagePart
from vlmrm.errors import CheckpointError, ConfigError, MediaError, RewardError, RowError
from vlmrm.modeling.manifest import read_json_of
from vlmrm.modeling.published_weights import lora_merged, lora_scale, pretrained, read_weights, shared
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer
from vlmrm.rewards.contract import (
    PLACEHOLDER,
    PointwiseRewardModel,
    Processes,
    RewardArguments,
    RewardModelOutput,
    Verdict,
    choice,
    read_template,
)
from vlmrm.weights import load_exactly

Reading = Callable[[list[list[float]]], Verdict]  # of the head's outputs at each reward token
EMBEDDINGS = "backbone.language_model.embed_tokens.weight"

# Names of transformers before 4.52 and since → those of `RewardTokenModel`, the first that fits.
NAMES = {
    r"^(model\.)?visual\.": "backbone.visual.",
    r"^model\.language_model\.": "backbone.language_model.",
    r"^model\.": "backbone.language_model.",
}
FILE = "HPSv3.safetensors"
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28  # of every image, in the published configuration; its sides are multiples of 28
CONFIG, ALIGN_FILE = "model_config.json", "checkpoint-11352/model.pth"
DIMENSIONS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{dimension}_reward|>" for dimension in DIMENSIONS)
MIN_PIXELS = 128 * 28 * 28  # of a frame, in the published code
MIN_FRAMES, MAX_FRAMES = 4, 768


class RewardTokenModel(nn.Module):
    """Qwen2-VL and a head; `forward` returns the head's outputs at each reward token: [B, tokens, outputs]."""

    def __init__(self, config: Qwen2VLConfig, head: nn.Module):
        super().__init__()
        self.backbone = Qwen2VLModel(config)
        self.rm_head = head

    def forward(self, inputs: Mapping[str, torch.Tensor], token_ids: Sequence[int]) -> torch.Tensor:
        ids = inputs["input_ids"]
        # One-dimensional positions for images too: the published code never computes Qwen2-VL's own.
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        hidden = self.backbone(**inputs, position_ids=positions, use_cache=False).last_hidden_state
        return self.rm_head(torch.stack([hidden[ids == token] for token in token_ids], dim=1).float())


class RewardTokenReader:
    """A published reward model, by its weights but `lm_head`, with the configuration and processor of `base`.

    The published code adds the reward tokens to the tokenizer in the order of `tokens`.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        base: str,
        tokens: Sequence[str],
        head: nn.Module,
        source: str,
        dtype: torch.dtype,
        device: torch.device,
        renderer: type[Renderer] = Renderer,
    ):
        processor = pretrained(AutoProcessor, base)
        processor.tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        self.tokens = list(tokens)
        self.token_ids = processor.tokenizer.convert_tokens_to_ids(self.tokens)
        named = _renamed(weights)
        config = pretrained(AutoConfig, base)
        if EMBEDDINGS in named:  # the weights decide the size of the vocabulary
            config.get_text_config().vocab_size = len(named[EMBEDDINGS])
        with init_empty_weights(include_buffers=False):
            self.model = RewardTokenModel(config, head)
        load_exactly(self.model, named, source)
        # This rounds the rotary frequencies too, as in the published code that the weights were trained with.
        self.model.backbone.to(dtype)
        self.model.rm_head.float()
        self.model.eval().requires_grad_(False).to(device)
        self.renderer = renderer(processor, written=self.tokens)
        self.batch = PaddedBatcher.for_processor(processor)
        self.lock = threading.Lock()

    @torch.inference_mode()
    def verdicts(self, conversations: Sequence[Conversation], batch_size: int, verdict: Reading) -> list[Verdict]:
        """Return `verdict` of the head's outputs at each reward token of each conversation, or why there is none."""
        rendered: dict[int, Rendered] = {}
        results: dict[int, Verdict] = {}
        with self.lock:
            cache: dict[str, ProcessedMedia] = {}
            for index, conversation in enumerate(conversations):
                try:
                    rendered[index] = self._render(conversation, cache)
                except RowError as error:
                    results[index] = Verdict(failure=error.reason)
            indices = list(rendered)
            for start in range(0, len(indices), batch_size):
                part = indices[start : start + batch_size]
                inputs = to_device(self.batch([rendered[index] for index in part]), self.model.backbone.device)
                inputs.pop("mm_token_type_ids", None)  # only for three-dimensional positions
                results |= zip(part, map(verdict, self.model(inputs, self.token_ids).tolist()), strict=True)
        return [results[index] for index in range(len(conversations))]

    def _render(self, conversation: Conversation, cache: dict[str, ProcessedMedia]) -> Rendered:
        rendered = self.renderer.render(conversation, cache)
        for name, token in zip(self.tokens, self.token_ids, strict=True):
            if rendered.input_ids.count(token) != 1:
                raise RowError(f"its prompt spells {name}, the token at which the reward is read: remove it")
        return rendered


def published_template(config: RewardArguments, original: str, *tokens: str) -> str:
    """Return the instruction that the weights were trained with, from the file `template_file`."""
    if (template := read_template(config, *tokens)) is None:
        raise ConfigError(
            f"reward {config.name} has no template_file, its published instruction: `vlmrm rewards record "
            f"{original}` writes it."
        )
    return template


def question(medium: Medium, template: str, prompt: str) -> Conversation:
    """Return the user's turn: the medium, then the template with the prompt."""
    return Conversation((Message.of("user", medium, template.replace(PLACEHOLDER, prompt)),))


def _renamed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, value in weights.items():
        if name.startswith("lm_head."):
            continue
        old = next((old for old in NAMES if re.match(old, name)), None)
        renamed[name if old is None else re.sub(old, NAMES[old], name)] = value
    return renamed


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
        name = str(extra.get("weights_name", ALIGN_FILE))
        base = str(extra.get("base_name_or_path", "Qwen/Qwen2-VL-2B-Instruct"))
        self.published = _published(path)
        self.reader = shared(_load_align, path, name, base, self.dtype, self.device)
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


def _load_align(path: str, name: str, base: str, dtype: torch.dtype, device: torch.device) -> RewardTokenReader:
    lora = _published(path)["peft_lora_config"]
    scale = lora_scale(lora["lora_r"], lora["lora_alpha"], lora.get("use_rslora"))
    weights = merged(read_weights(path, name), scale)
    if "rm_head.weight" not in weights:
        raise CheckpointError(f"{name} of {path} has no rm_head: it is not VideoAlign's weight file.")
    head = nn.Linear(weights["rm_head.weight"].shape[1], 1, bias=False)
    return RewardTokenReader(weights, base, TOKENS, head, f"{name} of {path}", dtype, device, FrameRenderer)
