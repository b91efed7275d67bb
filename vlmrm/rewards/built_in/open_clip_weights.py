"""Weights of open_clip's CLIP under the names of transformers' `CLIPModel`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

# open_clip's names → transformers', the first that fits. In a block every name is of one of its parts.
TOP = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",  # transformers spells it so
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    "transformer.resblocks": "text_model.encoder.layers",
}
BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
ATTENTION = re.compile(r"(.+)\.attn\.in_proj_(weight|bias)")


def to_transformers(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights for `CLIPModel`: open_clip keeps query, key and value in one, and projections transposed."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if name == "attn_mask":
            continue  # a constant
        top = next((old for old in TOP if name == old or name.startswith(f"{old}.")), None)
        name = name if top is None else TOP[top] + name[len(top) :]
        attention = ATTENTION.fullmatch(name)
        if attention:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                found[f"{attention[1]}.self_attn.{part}_proj.{attention[2]}"] = piece.clone()
            continue
        for old, new in BLOCK.items():
            name = re.sub(rf"(layers\.\d+)\.{re.escape(old)}\.", rf"\1.{new}.", name)
        found[name] = value.T.contiguous() if name.endswith("_projection.weight") else value
    return found
