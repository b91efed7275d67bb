"""Which attention kernel the model runs with."""

from __future__ import annotations

import logging
from functools import cache

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from vlmrm.errors import ConfigError
from vlmrm.private_names import relies_on

logger = logging.getLogger("vlmrm")

relies_on(PreTrainedConfig, "_attn_implementation")

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


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the kernel that the language model runs with now."""
    return model.config.get_text_config()._attn_implementation


@cache
def _say_once(line: str) -> None:
    logger.warning(line)


def _flash_lacks() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU: run on one"
    if not is_flash_attn_2_available():
        return "flash-attn is not installed: pip install -e '.[flash]' in vlmrm's folder"
    return None
