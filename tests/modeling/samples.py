"""Eight conversations that differ in length and media, and their batches: what the modeling tests score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from PIL import Image
from transformers import LlavaConfig

from vlmrm.modeling import (
    ModelArguments,
    load_for_training,
    load_processor,
    lora_config,
    save_reward_files,
    write_complete,
)
from vlmrm.modeling.manifest import weights_digest


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


def save_adapter(folder: Path, base: Path, head: str = "linear") -> torch.Tensor:
    """Save an adapter whose every weight has been moved, as training does, and return its scores."""
    processor = load_processor(base)
    model = load_for_training(base, head=head)
    adapted = get_peft_model(model, lora_config(ModelArguments(use_peft=True, lora_r=4), model))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    adapted.save_pretrained(folder)
    save_reward_files(
        folder,
        processor=processor,
        head=head,
        shown={"max_pixels": 9999},
        provenance={"base_model": "tiny"},
        base_digest=weights_digest(base),
    )
    write_complete(folder, world_size=1, step=7)
    return scores(adapted, processor)


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
