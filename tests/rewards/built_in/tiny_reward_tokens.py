"""A tiny Qwen2-VL, and the published code's way from a text and a picture to the hidden states of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlmrm.modeling.tiny import make_tiny


def save_base(folder: Path) -> Path:
    return make_tiny(folder, "qwen2_vl")


def with_tokens(base: Path, tokens: list[str]) -> tuple[Any, Any, list[int]]:
    """Processor and model with more tokens, and their ids."""
    processor = AutoProcessor.from_pretrained(base)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    torch.manual_seed(0)
    model.resize_token_embeddings(len(processor.tokenizer))
    return processor, model, processor.tokenizer.convert_tokens_to_ids(tokens)


def published_names(weights: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Names as transformers 4.45 had them, with which the published weights were made."""
    return {
        name.replace(f"{prefix}model.language_model.", f"{prefix}model.").replace(
            f"{prefix}model.visual.", f"{prefix}visual."
        ): value.clone()
        for name, value in weights.items()
    }


@torch.no_grad()
def hidden_states(processor: Any, model: Any, media: dict[str, Any], text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T] and hidden states [T, D] of one question, at the plain positions 0 to T - 1."""
    kind = media["type"]
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    options: dict[str, Any] = {"images": [media[kind]]}
    if kind == "video":
        options = {"videos": [media[kind]], "do_sample_frames": False, "do_resize": False}
    inputs = processor(text=[rendered], return_tensors="pt", **options)
    ids = inputs["input_ids"]
    qwen = model.model
    embeds = qwen.language_model.embed_tokens(ids)
    if kind == "image":
        seen = qwen.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
        places = ids == model.config.image_token_id
    else:
        seen = qwen.visual(inputs["pixel_values_videos"], grid_thw=inputs["video_grid_thw"]).pooler_output
        places = ids == model.config.video_token_id
    embeds[places] = seen
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    found = qwen.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
    return ids[0], found[0]
