"""`ImageReward`: human preference of an image for a prompt, by BLIP and a small head."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from PIL import Image
from torch import nn
from transformers import (
    AutoTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
    CLIPImageProcessorPil,
    PreTrainedTokenizerBase,
)

from vlmrm.data.media import media_key
from vlmrm.errors import CheckpointError
from vlmrm.modeling.manifest import read_json_of
from vlmrm.modeling.published_weights import pretrained, read_weights, shared
from vlmrm.rewards.built_in.clip import Truncation
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput, choice
from vlmrm.rewards.pictures import FRAMES, once_each, views_of
from vlmrm.weights import load_exactly

FILE, TEXT_CONFIG = "ImageReward.pt", "med_config.json"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of raw scores, in the published code
MAX_TOKENS = 35
HEAD_WIDTH = 64  # of an attention head in the vision transformers of BLIP, whatever their size

# The published code's names → transformers'.
NAMES = {
    r"^blip\.visual_encoder\.cls_token$": "vision.embeddings.class_embedding",
    r"^blip\.visual_encoder\.pos_embed$": "vision.embeddings.position_embedding",
    r"^blip\.visual_encoder\.patch_embed\.proj\.": "vision.embeddings.patch_embedding.",
    r"^blip\.visual_encoder\.norm\.": "vision.post_layernorm.",
    r"^blip\.visual_encoder\.blocks\.": "vision.encoder.layers.",
    r"^(vision\.encoder\.layers\.\d+)\.norm(\d)\.": r"\1.layer_norm\2.",
    r"^(vision\.encoder\.layers\.\d+)\.attn\.qkv\.": r"\1.self_attn.qkv.",
    r"^(vision\.encoder\.layers\.\d+)\.attn\.proj\.": r"\1.self_attn.projection.",
    r"^blip\.text_encoder\.": "text.",
    r"^mlp\.layers\.": "head.",
}
# Constants, and projections of BLIP's pretraining that ImageReward does not use.
UNUSED = re.compile(r"^blip\.(vision_proj|text_proj)\.|\.position_ids$")


class ImageReward(PointwiseRewardModel):
    """(h - 0.167) / 1.033, with h the head's output for BLIP's encoding of the prompt and the image.

    From Xu et al. 2023, ImageReward. The text encoder attends to the image; the head is five linear layers on its
    first token. The image is resized by its shorter side to 224 and cropped to the centre; a prompt has 35 tokens at
    most.
    """

    required_fields = ("prompt",)
    text_prompts = True
    options = ("model_name_or_path", "tokenizer_name_or_path", "video_frames")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        path = str(config.extra_kwargs.get("model_name_or_path", "THUDM/ImageReward"))
        tokenizer = str(config.extra_kwargs.get("tokenizer_name_or_path", "google-bert/bert-base-uncased"))
        self.frames = choice(config, "video_frames", "mean", FRAMES)
        self.reader = shared(_load, path, tokenizer, self.dtype, self.device)
        self.model = self.reader.model

    def __call__(  # ty: ignore[incompatible-method-override]
        self, prompt: list[str], image: list[Image.Image] | None = None, video: list[list[Image.Image]] | None = None
    ) -> RewardModelOutput:
        views = views_of(image, video, self.frames)
        pairs = [(text, picture) for text, view in zip(prompt, views, strict=True) for picture in view]
        scores = iter(self.reader.scores(pairs, self.config.batch_size))
        return RewardModelOutput(rewards=[sum(next(scores) for _ in view) / len(view) for view in views])


class ImageRewardModel(nn.Module):
    """BLIP's two encoders and the head; `forward` returns the head's output for each image and text: [N]."""

    def __init__(self, vision: BlipVisionConfig, text: BlipTextConfig):
        super().__init__()
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        # No activations, as published; the dropouts keep the indices in the weights' names.
        self.head = nn.Sequential(
            nn.Linear(text.hidden_size, 1024), nn.Dropout(0.2),
            nn.Linear(1024, 128), nn.Dropout(0.2),
            nn.Linear(128, 64), nn.Dropout(0.1),
            nn.Linear(64, 16), nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, pixels: torch.Tensor, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        image_states = self.vision(pixel_values=pixels.to(self.vision.dtype)).last_hidden_state
        text_states = self.text(**tokens, encoder_hidden_states=image_states).last_hidden_state
        return self.head(text_states[:, 0].float()).squeeze(-1)


class _ImageRewardReader:
    """The model with its tokenizer and image processor."""

    def __init__(self, model: ImageRewardModel, tokenizer: PreTrainedTokenizerBase):
        self.model = model.eval().requires_grad_(False)
        self.tokens = Truncation(tokenizer, MAX_TOKENS, "ImageReward")
        size = self.model.vision.config.image_size
        sizes: Any = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
        self.images = CLIPImageProcessorPil(**sizes, do_convert_rgb=True)
        self.lock = threading.Lock()

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[str, Image.Image]], batch_size: int) -> list[float]:
        """Return the normalised score of each text and image."""
        with self.lock:
            keys = ((text, media_key(picture)) for text, picture in pairs)
            outputs = once_each(keys, pairs, lambda distinct: self._outputs(distinct, batch_size))
        return [(output - MEAN) / STD for output in outputs]

    def _outputs(self, pairs: Sequence[tuple[str, Image.Image]], batch_size: int) -> Iterator[float]:
        for start in range(0, len(pairs), batch_size):
            texts, pictures = zip(*pairs[start : start + batch_size], strict=True)
            device = self.model.vision.device
            pixels = self.images(list(pictures), return_tensors="pt")["pixel_values"].to(device)
            tokens = {name: value.to(device) for name, value in self.tokens(texts).items()}
            yield from self.model(pixels, tokens).tolist()


def _load(path: str, tokenizer_path: str, dtype: torch.dtype, device: torch.device) -> _ImageRewardReader:
    weights = _renamed(read_weights(path, FILE))
    text = read_json_of(path, TEXT_CONFIG)
    if text is None:
        raise CheckpointError(f"there is no {TEXT_CONFIG} in {path}: give the folder or repository that has it.")
    vision = _vision_config(weights, f"{FILE} of {path}")
    with init_empty_weights(include_buffers=False):
        model = ImageRewardModel(vision, _text_config(text, vision.hidden_size))
    load_exactly(model, weights, f"{FILE} of {path}")
    model.to(device)
    model.vision.to(dtype)
    model.text.to(dtype)
    tokenizer = pretrained(AutoTokenizer, tokenizer_path)
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    return _ImageRewardReader(model, tokenizer)


def _renamed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the published weights under the names of `ImageRewardModel`."""
    renamed = {}
    for name, value in weights.items():
        if UNUSED.search(name):
            continue
        for old, new in NAMES.items():
            name = re.sub(old, new, name)
        renamed[name] = value
    return renamed


def _vision_config(weights: Mapping[str, torch.Tensor], source: str) -> BlipVisionConfig:
    """Return the configuration of BLIP's vision transformer, ViT-L in the published file, from the weights' shapes."""
    try:
        width, _, patch, _ = weights["vision.embeddings.patch_embedding.weight"].shape
        positions = weights["vision.embeddings.position_embedding"].shape[1]
        inner = weights["vision.encoder.layers.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{source} is not ImageReward's weight file: it lacks BLIP's vision encoder.") from error
    depth = len([name for name in weights if re.fullmatch(r"vision\.encoder\.layers\.\d+\.mlp\.fc1\.weight", name)])
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=width // HEAD_WIDTH,
        image_size=patch * round((positions - 1) ** 0.5),
        patch_size=patch,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )


def _text_config(published: Mapping[str, Any], vision_width: int) -> BlipTextConfig:
    """Return the configuration of BERT with cross attention, from `med_config.json`."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("max_position_embeddings", "hidden_act", "layer_norm_eps", "pad_token_id"),
    )
    return BlipTextConfig(
        **{name: published[name] for name in names}, encoder_hidden_size=vision_width, is_decoder=True
    )
