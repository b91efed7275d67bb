"""Which attention kernel the model runs with."""

from __future__ import annotations

import logging
from functools import cache

import torch
from transformers.utils import is_flash_attn_2_available

from vlmrm.errors import ConfigError

logger = logging.getLogger("vlmrm")

ATTENTION = ("auto", "flash_attention_2", "sdpa")


def resolve_attention(name: str) -> str:
    """The kernel for `name`: `auto` is flash attention where it can run, else PyTorch's own, `sdpa`.

    Raises:
        ConfigError: when flash attention is asked for by name and cannot run here, or the name is unknown.
    """
    if name not in ATTENTION:
        raise ConfigError(f"attn_implementation is {name!r}: choose one of {', '.join(ATTENTION)}.")
    if name == "sdpa":
        return "sdpa"
    missing = _flash_lacks()
    if missing is None:
        return "flash_attention_2"
    if name == "flash_attention_2":
        raise ConfigError(
            f"attn_implementation is flash_attention_2, but {missing}, or write attn_implementation: auto."
        )
    _say_once(f"attn_implementation: sdpa, because {missing}")
    return "sdpa"


@cache
def _say_once(line: str) -> None:
    logger.warning(line)


def _flash_lacks() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU: run on one"
    if not is_flash_attn_2_available():
        return "flash-attn is not installed: pip install -e '.[flash]' in vlmrm's folder"
    return None
