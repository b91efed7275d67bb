"""Eight conversations that differ in length and media, and their batches: what the modeling tests score."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from transformers import LlavaConfig


def conversation(text: str, answer: str, *colours: str) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": Image.new("RGB", (56 + 28 * i, 84), c)} for i, c in enumerate(colours)]
    return [
        {"role": "user", "content": [*images, {"type": "text", "text": text}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


SAMPLES = [
    conversation("Which digit is this?", "seven", "red"),
    conversation("Which digit is this?", "This is a handwritten digit, and it is seven.", "blue"),
    conversation("Is it odd?", "", "white"),
    conversation("Compare the images.", "one and two", "red", "green"),
    conversation("No image here.", "zero"),
    conversation("", "A"),
    conversation("Draw the digit nine.", "nine " * 20, "black", "white", "red"),
    conversation("the\nend<|endoftext|>", "<|endoftext|>", "yellow"),
]


def batch_of(processor, conversations, side: str = "right") -> dict[str, torch.Tensor]:
    """The conversations as one padded batch."""
    kwargs = {"padding": True, "padding_side": side, "return_tensors": "pt"}
    return dict(processor.apply_chat_template(conversations, tokenize=True, return_dict=True, processor_kwargs=kwargs))


def scores(model, processor, conversations=SAMPLES, side: str = "right") -> torch.Tensor:
    """One float32 score for each conversation: [N]."""
    with torch.no_grad():
        return model.eval()(**batch_of(processor, conversations, side)).logits[:, 0]


def tiny_llava() -> LlavaConfig:
    """An architecture outside the Qwen family: its tower and projector stand beside the language model."""
    return LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        text_config={
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50,
        },
        image_token_index=49,
    )  # fmt: skip
