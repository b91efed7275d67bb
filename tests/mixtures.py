"""A tiny mixture-of-experts checkpoint with random weights, Qwen3-VL-MoE."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

from vlmrm.modeling import make_tiny

EXPERTS = 8
CHOICES = 2
LAYERS = 2


def make_tiny_mixture(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Qwen3-VL-MoE of two layers of eight experts, with the processor of the tiny Qwen3-VL."""
    make_tiny(folder, arch="qwen3_vl")
    keys = json.loads((folder / "config.json").read_text())
    keys["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOICES,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    keys["vision_config"]["model_type"] = "qwen3_vl_moe_vision"
    for key in ("model_type", "architectures", "transformers_version", "dtype"):
        keys.pop(key, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(Qwen3VLMoeConfig(**keys), dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return folder
