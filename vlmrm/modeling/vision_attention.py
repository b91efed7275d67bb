"""Attention of vision towers: one call a layer for all windows and images of a batch.

Towers that pack images attend within segments: images, frames or windows, by their cumulative lengths. The library
hands these to an attention function whose name contains "flash", and calls any other once for each segment, with
lengths that it waits for in every layer. `by_segments` is registered under such a name. It is chosen when a model is
made, and computes with the kernels of the text (`vlmrm.modeling.varlen`), or with torch's own where those do not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.generic import is_flash_attention_requested

from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on
from vlmrm.modeling.kernels import WIDEST_HEAD, log_once
from vlmrm.modeling.varlen import FLASH, TORCH, attend_varlen

relies_on(PreTrainedConfig, "_attn_implementation")
if not is_flash_attention_requested(requested_attention_implementation="flash_segments"):
    raise ConfigError("transformers no longer knows FlashAttention by its name: install an older version.")

# By the kernel under them, for half precision on CUDA.
SEGMENTS = {TORCH: "flash_segments", **{kernel: f"flash_segments_{kernel[-1]}" for kernel in FLASH}}
GATHERS = 4  # calls of attention that cost less than sorting the tokens before them
# Keywords of the library without effect on attention.
WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "max_length_q", "max_length_k", "output_attentions", "output_hidden_states", "return_dict"),
        *("use_cache", "cache_position", "interpolate_pos_encoding", "grid_thw"),
    )
)


@dataclass(frozen=True)
class Segments:
    """Segments of a row of T tokens, by their lengths [N], which are known on the host.

    `runs` are the (length, number) of segments that are computed in one call. They are neighbours in the row, or where
    that would be many calls, in `order` [T], the row's tokens by the length of their segment.
    """

    lengths: Sequence[int]
    runs: Sequence[tuple[int, int]]
    order: np.ndarray | None = None

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        lengths = [length for length in lengths if length]
        runs, by_length = _runs(lengths), _runs(sorted(lengths))
        if len(runs) <= len(by_length) + GATHERS:
            return cls(lengths, runs)
        return cls(lengths, by_length, np.repeat(lengths, lengths).argsort(kind="stable"))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def cumulative(self, device: torch.device) -> torch.Tensor:
        """Return the cumulative lengths [N + 1], int32, on a device; `segments_of` knows what they are."""
        total = torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int32)).to(device, non_blocking=True)
        _SEGMENTS[total] = self
        return total


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(length, len([*run])) for length, run in groupby(lengths)]


# By the tensors of cumulative lengths that were made from them, or from which they were read.
_SEGMENTS = WeakTensorKeyDictionary()


def segments_of(cumulative: torch.Tensor) -> Segments:
    """Return the segments of cumulative lengths [N + 1]. Unless they are known, the host waits for them once."""
    if cumulative not in _SEGMENTS:
        _SEGMENTS[cumulative] = Segments.of(cumulative.diff().tolist())
    return _SEGMENTS[cumulative]


def by_segments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    is_causal: bool | None = None,
    flash: str = TORCH,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend both ways within segments: query[1, H, T, D], key[1, KV, T, D], value[1, KV, T, V] → [1, T, H, V].

    Without `cu_seq_lens_q` it is the library's sdpa. `flash` is the kernel for half precision on CUDA.

    Raises:
        ConfigError: for a keyword that changes attention and is not computed here.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **keywords
        )
    refused = [name for name, setting in keywords.items() if setting is not None and name not in WITHOUT_EFFECT]
    refused += ["attention_mask"] * (attention_mask is not None) + ["is_causal"] * bool(is_causal)
    refused += ["other lengths of keys"] * (cu_seq_lens_k is not cu_seq_lens_q)
    if refused:
        raise ConfigError(
            f"the attention of vision towers does not compute {', '.join(refused)} of {type(module).__name__}: "
            "install another version of transformers."
        )
    segments = segments_of(cu_seq_lens_q)
    where = f"{value.dtype} on {value.device.type}"
    half = value.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[3]
    if value.is_cuda and half and not dropout and width == value.shape[3] <= WIDEST_HEAD and width % 8 == 0:
        log_once("vision attention", flash, where)
        queries, keys, values = (
            states[0].transpose(0, 1).to(value.dtype).contiguous() for states in (query, key, value)
        )
        lengths = (cu_seq_lens_q, cu_seq_lens_q, segments.longest, segments.longest)
        return attend_varlen(flash, queries, keys, values, *lengths, scaling=scaling, causal=False).unsqueeze(0), None
    log_once("vision attention", "sdpa", where)
    return per_length(query, key, value, segments, scaling, dropout), None


def per_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Call torch's attention once for all segments of a length, as a batch; on any device, in any type."""
    rows = [states[0] for states in (query, key, value)]
    order = None
    if segments.order is not None:
        order = torch.from_numpy(segments.order).to(query.device, non_blocking=True)
        rows = [states.index_select(1, order) for states in rows]
    sizes = [length * count for length, count in segments.runs]
    outputs = []
    for (length, count), *run in zip(segments.runs, *(states.split(sizes, dim=1) for states in rows), strict=True):
        states = [piece.unflatten(1, (count, length)).transpose(0, 1) for piece in run]  # [count, H, length, D]
        output = scaled_dot_product_attention(
            *states, dropout_p=dropout, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs)
    return (output if order is None else torch.empty_like(output).index_copy(0, order, output)).unsqueeze(0)


for _kernel, _name in SEGMENTS.items():
    AttentionInterface.register(_name, partial(by_segments, flash=_kernel))
    AttentionMaskInterface.register(_name, sdpa_mask)


def attend_by_segments(backbone: PreTrainedModel, towers: Sequence[nn.Module]) -> None:
    """Let the towers of a backbone that take cumulative lengths attend by segments; others keep their attention."""
    shared = [backbone.config, backbone.config.get_text_config()]
    for tower in towers:
        config = getattr(tower, "config", None)
        if config is None or any(config is text for text in shared) or not takes_segments(tower):
            continue
        config._attn_implementation = SEGMENTS.get(config._attn_implementation, SEGMENTS[TORCH])


def takes_segments(tower: nn.Module) -> bool:
    """Return whether a tower hands cumulative lengths to attention functions that are called "flash..."."""
    codes = [inspect.unwrap(forward).__code__ for forward in {type(module).forward for module in tower.modules()}]
    asking = [code for code in codes if is_flash_attention_requested.__name__ in code.co_names]
    return bool(asking) and all(
        any(isinstance(names, tuple) and "cu_seq_lens_q" in names for names in code.co_consts) for code in asking
    )
