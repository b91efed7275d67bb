"""Variable-length attention on CUDA in half precision: FlashAttention 3 or 2 where one is chosen, else torch's own.

All take the tokens of many sequences side by side and their cumulative lengths. Masks are aligned to the bottom right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from vlmrm.errors import ConfigError

# The kernels by transformers' names for them, best first, and the modules that have them.
FLASH = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
TORCH = "varlen_attn"
KEYWORDS = ("scale", "window_size")


def attend_varlen(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scaling: float | None,
    causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Attend within each of N sequences: query[T, H, D], key and value[K, KV, D] → [T, H, D].

    `cu_queries` and `cu_keys` [N + 1], int32, are the sequences' cumulative lengths, `max_*` the longest. With
    `window`, a query sees as many keys back, its own included. `kernel` is one of `FLASH`, or `TORCH`.
    """
    sides = (-1 if window is None else window - 1, 0 if causal else -1)
    lengths = (cu_queries, cu_keys, max_queries, max_keys)
    if kernel in FLASH:
        function: Callable[..., Any] = import_module(FLASH[kernel]).flash_attn_varlen_func
        output = function(query, key, value, *lengths, softmax_scale=scaling, causal=causal, window_size=sides)
        return output[0] if isinstance(output, tuple) else output  # some releases of 3 add the softmax's sums
    # The GPU benchmark also runs beside torch 2.11, which has no such keyword and groups heads unasked.
    asked = "enable_gqa" in _parameters(varlen_attn)
    grouped: dict[str, Any] = {"enable_gqa": key.shape[1] != query.shape[1]} if asked else {}
    output = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=sides, **grouped)
    assert isinstance(output, torch.Tensor)
    return output


def check_kernel() -> None:
    """Refuse a torch with a variable-length attention that lacks a keyword of `attend_varlen`."""
    if missing := [name for name in KEYWORDS if name not in _parameters(varlen_attn)]:
        raise ConfigError(
            f"batching: shared needs torch 2.12 or newer, and varlen_attn of torch {torch.__version__} does not know "
            f"{', '.join(missing)}: install a newer torch, or write batching: reference."
        )


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
