"""A tiny CLIP with random weights: transformers' checkpoint of it, and open_clip's weights and arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import pre_tokenizers
from torch.nn.functional import conv2d, gelu, layer_norm, multi_head_attention_forward
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

HEADS, LAYERS, SIZE, PATCH = 2, 2, 28, 14
TEXT_WIDTH, VISION_WIDTH, WIDTH = 32, 48, 16


def noise(*sizes: tuple[int, int]) -> list[Image.Image]:
    """Pictures of random pixels, of such heights and widths."""
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def tokenizer() -> CLIPTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[])


def config() -> CLIPConfig:
    text, vision = (
        {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu"}
        | {"hidden_size": width, "intermediate_size": 4 * width}
        for width in (TEXT_WIDTH, VISION_WIDTH)
    )
    text |= {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision |= {"image_size": SIZE, "patch_size": PATCH}
    return CLIPConfig(projection_dim=WIDTH, text_config=text, vision_config=vision)


def save_checkpoint(folder: Path) -> Path:
    """A checkpoint of transformers with its tokenizer and image processor; exp(logit_scale) is 100."""
    torch.manual_seed(0)
    model = CLIPModel(config())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.logit_scale.data.fill_(4.6052)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    side = {"shortest_edge": SIZE}
    CLIPImageProcessor(size=side, crop_size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def open_clip_weights() -> dict[str, torch.Tensor]:
    """Random weights under open_clip's names."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    patches = (SIZE // PATCH) ** 2
    found = {
        "positional_embedding": random(77, TEXT_WIDTH),
        "text_projection": random(TEXT_WIDTH, WIDTH),
        "logit_scale": torch.tensor(4.6052),
        "visual.class_embedding": random(VISION_WIDTH),
        "visual.positional_embedding": random(patches + 1, VISION_WIDTH),
        "visual.proj": random(VISION_WIDTH, WIDTH),
        "visual.conv1.weight": random(VISION_WIDTH, 3, PATCH, PATCH),
        "token_embedding.weight": random(514, TEXT_WIDTH),
    }
    norms = {"visual.ln_pre": VISION_WIDTH, "visual.ln_post": VISION_WIDTH, "ln_final": TEXT_WIDTH}
    for tower, width in (("visual.", VISION_WIDTH), ("", TEXT_WIDTH)):
        for layer in range(LAYERS):
            block = f"{tower}transformer.resblocks.{layer}"
            norms |= {f"{block}.ln_1": width, f"{block}.ln_2": width}
            found |= {f"{block}.attn.in_proj_weight": random(3 * width, width)}
            found |= {f"{block}.attn.in_proj_bias": random(3 * width)}
            for name, rows, columns in (
                ("attn.out_proj", width, width),
                ("mlp.c_fc", 4 * width, width),
                ("mlp.c_proj", width, 4 * width),
            ):
                found |= {f"{block}.{name}.weight": random(rows, columns), f"{block}.{name}.bias": random(rows)}
    for name, width in norms.items():
        found |= {f"{name}.weight": 1 + random(width), f"{name}.bias": random(width)}
    return found


def open_clip_image(weights: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """What open_clip's vision tower makes of one image [3, SIZE, SIZE]: [WIDTH]."""
    patches = conv2d(pixels[None], weights["visual.conv1.weight"], stride=PATCH)[0].flatten(1).T
    x = torch.cat([weights["visual.class_embedding"][None], patches]) + weights["visual.positional_embedding"]
    x = _blocks(weights, "visual.", _norm(weights, "visual.ln_pre", x), None)
    return _norm(weights, "visual.ln_post", x[0]) @ weights["visual.proj"]


def open_clip_text(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """What open_clip's text tower makes of one text's tokens, of which the last is the end: [WIDTH]."""
    x = weights["token_embedding.weight"][ids] + weights["positional_embedding"][: len(ids)]
    x = _blocks(weights, "", x, torch.full((len(ids), len(ids)), float("-inf")).triu(1))
    return _norm(weights, "ln_final", x[-1]) @ weights["text_projection"]


def _norm(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _blocks(weights, tower: str, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    for layer in range(LAYERS):
        block = {
            name.removeprefix(f"{tower}transformer.resblocks.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"{tower}transformer.resblocks.{layer}.")
        }
        y = _norm(block, "ln_1", x)
        attended, _ = multi_head_attention_forward(
            y, y, y, x.shape[-1], HEADS, block["attn.in_proj_weight"], block["attn.in_proj_bias"], None, None, False,
            0.0, block["attn.out_proj.weight"], block["attn.out_proj.bias"], attn_mask=mask, need_weights=False,
        )  # fmt: skip
        x = x + attended
        y = gelu(_norm(block, "ln_2", x) @ block["mlp.c_fc.weight"].T + block["mlp.c_fc.bias"])
        x = x + y @ block["mlp.c_proj.weight"].T + block["mlp.c_proj.bias"]
    return x
