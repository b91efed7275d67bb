"""Models of real proportions with random weights, made where they run; and what this GPU can do at most."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig

from benchmarks import harness
from benchmarks.shapes import PAD, QWEN, configuration, reward_checkpoint
from vlmrm.modeling.manifest import COMPLETE
from vlmrm.training.step import data_sheet_rate

# Of Qwen2.5-VL-3B and 7B, from their config.json; a test compares them where the files are.
TEXT: dict[str, dict[str, Any]] = {
    "3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
}
VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def real_configuration(size: str, tiny: bool = False) -> Any:
    """Return the configuration of `3b` or `7b`; `tiny` has two small layers in their place."""
    if tiny:
        return configuration("tiny")
    text = TEXT[size]
    return Qwen2_5_VLConfig(
        text_config=text
        | {
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "tie_word_embeddings": size == "3b",
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config=VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=size == "3b",
        **QWEN,
    )


def checkpoint(scratch: Path, size: str, device: str, tiny: bool = False) -> Path:
    """Return the folder of a reward model in bfloat16 with random weights, written on first use."""
    folder = scratch / (f"{size}-tiny" if tiny else size)
    if not (folder / "reward-model" / COMPLETE).is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was stopped while writing it
        folder.mkdir(parents=True)
        reward_checkpoint(folder, real_configuration(size, tiny), device, torch.bfloat16)
    return folder / "reward-model"


@cache
def matrix_product(device: str, size: int) -> float:
    """Return the operations per second of a bfloat16 product of square matrices, the peak of this machine."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            a @ b

    timings = harness.interleave({"product": lambda: products}, 5, device)
    return 10 * 2 * size**3 / timings.median("product")


def peak(device: str) -> float:
    """Return the operations a second that utilisation is a share of: the data sheet's, or those of a product here."""
    if device == "cpu":
        return matrix_product("cpu", 256)
    return data_sheet_rate(torch.device(device)) or matrix_product(device, 8192)


def peak_gib(work: Callable[[], Any], device: str) -> float | None:
    """Return the peak memory of tensors during `work` in GiB, weights included; None on a CPU."""
    if device == "cpu":
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30
