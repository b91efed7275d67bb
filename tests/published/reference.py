"""What the authors of published reward models compute, in plain transformers calls: no import of vlmrm.

Each function follows one of their programs: its call of the processor, the token at which it reads, and the formula of
its head. `docs/models.md` names where they were read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import relu, silu

Weights = Mapping[str, torch.Tensor]
Messages = list[dict[str, Any]]


def images_of(messages: Messages) -> list[Any]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def inputs_of(processor: Any, texts: Sequence[str], images: Sequence[Any]) -> Any:
    """One padded batch, as a processor's own call makes it."""
    options = {"images": list(images)} if images else {}
    return processor(text=list(texts), padding=True, padding_side="right", return_tensors="pt", **options)


@torch.no_grad()
def states(model: Any, inputs: Any) -> torch.Tensor:
    """The last hidden states [B, T, H] of a language model."""
    return model(**inputs, output_hidden_states=True).hidden_states[-1]


def chat(processor: Any, conversations: Sequence[Messages]) -> list[str]:
    return [processor.apply_chat_template(c, tokenize=False, add_generation_prompt=False) for c in conversations]


def batched(processor: Any, model: Any, texts: Sequence[str], images: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    inputs = inputs_of(processor, texts, [image for group in images for image in group])
    return inputs, states(model, inputs)


def value_head(processor: Any, model: Any, head: Weights, conversations: Sequence[Messages]) -> torch.Tensor:
    """TRL's value of every token, gathered at the sum of the mask less one: Skywork's card, LLaMA-Factory."""
    inputs, hidden = batched(processor, model, chat(processor, conversations), list(map(images_of, conversations)))
    values = (hidden @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]).squeeze(-1)
    return values.gather(-1, inputs["attention_mask"].sum(-1, keepdim=True) - 1)[:, 0]


def before_the_padding(processor: Any, model: Any, head: Weights, conversations: Sequence[Messages]) -> torch.Tensor:
    """ms-swift's `score`, read before the first pad token, or at the end where there is none."""
    inputs, hidden = batched(processor, model, chat(processor, conversations), list(map(images_of, conversations)))
    ids = inputs["input_ids"]
    ends = (torch.eq(ids, processor.tokenizer.pad_token_id).int().argmax(-1) - 1) % ids.shape[-1]
    return (hidden @ head["score.weight"].T)[torch.arange(len(ids)), ends, 0]


def rightmost_token(processor: Any, model: Any, head: Weights, conversations: Sequence[Messages]) -> torch.Tensor:
    """transformers' sequence classification, with which TRL trains: the rightmost token that is no pad token."""
    inputs, hidden = batched(processor, model, chat(processor, conversations), list(map(images_of, conversations)))
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[-1]) * (ids != processor.tokenizer.pad_token_id)
    return (hidden @ head["score.weight"].T)[torch.arange(len(ids)), positions.argmax(-1), 0]


def two_layers(processor: Any, model: Any, head: Weights, conversations: Sequence[Messages]) -> torch.Tensor:
    """BaseReward's head by its paper: two layers, with SiLU between them."""
    inputs, hidden = batched(processor, model, chat(processor, conversations), list(map(images_of, conversations)))
    last = hidden[torch.arange(len(hidden)), inputs["attention_mask"].sum(-1) - 1]
    inner = silu(last @ head["score.0.weight"].T + head["score.0.bias"])
    return (inner @ head["score.2.weight"].T + head["score.2.bias"])[:, 0]


@torch.no_grad()
def at_tokens(
    processor: Any, model: Any, text: str, kind: str, media: Sequence[Any], tokens: Sequence[int], *, by_grid: bool
) -> torch.Tensor:
    """States [K, H] at tokens of a question about media, whose sizes stay as they are.

    Without `by_grid` the model is given embeddings, and so no grids: its positions are those of text.
    """
    messages = [{"role": "user", "content": [*({"type": kind} for _ in media), {"type": "text", "text": text}]}]
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    options: dict[str, Any] = {f"{kind}s": list(media), "do_resize": False}
    if kind == "video":
        options["do_sample_frames"] = False
    inputs, qwen = processor(text=[rendered], return_tensors="pt", **options), model.model
    ids = inputs["input_ids"]
    places = [ids[0].tolist().index(token) for token in tokens]
    if by_grid:
        return states(model, inputs)[0, places]
    pixels, grid = {
        "image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw"),
    }[kind]  # fmt: skip
    embeds = qwen.language_model.embed_tokens(ids)
    embeds[ids == getattr(model.config, f"{kind}_token_id")] = qwen.visual(
        inputs[pixels], grid_thw=inputs[grid]
    ).pooler_output
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    return qwen.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)[0][0, places]


def ranknet(head: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """μ and log σ of HPSv3 and EditReward: three layers, with ReLU between them."""
    for layer in (0, 3):
        x = relu(x @ head[f"{name}.{layer}.weight"].T + head[f"{name}.{layer}.bias"])
    return x @ head[f"{name}.5.weight"].T + head[f"{name}.5.bias"]
