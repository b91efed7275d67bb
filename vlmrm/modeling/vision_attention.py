"""Attention of vision towers: one call a layer for all windows and images of a batch.

Towers that pack images attend within segments: images, frames or windows, by their cumulative lengths. The library
hands these to an attention function whose name contains "flash", and calls any other once for each segment, with
lengths that it waits for in every layer. `by_segments` is registered under such a name. It is chosen when a model is
made, and computes with the kernels of the text (`vlmrm.modeling.varlen`), or with torch's own where those do not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
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

from vlmrm.batching.shared import on_device
from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on
from vlmrm.modeling.kernels import WIDEST_HEAD, log_once
from vlmrm.modeling.varlen import FLASH, TORCH, attend_varlen

relies_on(PreTrainedConfig, "_attn_implementation")
if not is_flash_attention_requested(requested_attention_implementation="flash_segments"):
    raise ConfigError("transformers no longer knows FlashAttention by its name: install an older version.")

# By the kernel under them, for half precision on CUDA.
SEGMENTS = {TORCH: "flash_segments", **{kernel: f"flash_segments_{kernel[-1]}" for kernel in FLASH}}
# Segments of no more tokens than these are padded to one length: their attention is a small part of a layer.
SHORT = 256
# Keywords of the library without effect on attention.
WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "max_length_q", "max_length_k", "output_attentions", "output_hidden_states", "return_dict"),
        *("use_cache", "cache_position", "interpolate_pos_encoding", "grid_thw"),
    )
)


@dataclass(eq=False)
class Segments:
    """Divide a row of T tokens into N segments; their lengths are known on the host."""

    lengths: Sequence[int]
    _padding: Padding | None = field(default=None, init=False)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def runs(self) -> list[tuple[int, int]]:
        """Return the (length, number) of neighbours of equal length."""
        return [(length, len([*run])) for length, run in groupby(self.lengths)]

    def cumulative(self, device: torch.device) -> torch.Tensor:
        """Return the cumulative lengths [N + 1], int32, on a device; `segments_of` knows what they are."""
        total = on_device(torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int32)), device)
        _SEGMENTS[total] = self
        return total

    def padding(self, device: torch.device) -> Padding | None:
        """Return how all segments are padded to the longest; None where that costs more than calls of their own."""
        if self.longest > SHORT:
            return None
        if self._padding is None or self._padding.taken.device != device:
            self._padding = Padding.of(self.lengths, device)
        return self._padding


@dataclass(frozen=True)
class Padding:
    """N segments padded to L tokens: `taken` [N * L] of the row, `put` [T], where among them the row's tokens are.

    `mask` [N, 1, 1, L] is minus infinity at padding, which repeats the first token of its segment.
    """

    taken: torch.Tensor
    put: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Padding:
        starts, places = np.cumsum([0, *lengths])[:-1, None], np.arange(max(lengths))
        real = places < np.array(lengths)[:, None]
        taken, put = np.where(real, starts + places, starts).ravel(), np.flatnonzero(real)
        mask = np.where(real, np.float32(0), np.float32(-np.inf))[:, None, None]
        return cls(*(on_device(torch.from_numpy(array), device) for array in (taken, put, mask)))


# By the tensors of cumulative lengths that were made from them, or from which they were read.
_SEGMENTS = WeakTensorKeyDictionary()


def segments_of(cumulative: torch.Tensor) -> Segments:
    """Return the segments of cumulative lengths [N + 1]. Unless they are known, the host waits for them once."""
    if cumulative not in _SEGMENTS:
        _SEGMENTS[cumulative] = Segments([length for length in cumulative.diff().tolist() if length])
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
        # Some towers count on the host.
        here = cu_seq_lens_q if cu_seq_lens_q.device == value.device else segments.cumulative(value.device)
        lengths = (here, here, segments.longest, segments.longest)
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
    """Call torch's attention once for all segments, padded, or once for neighbours of a length; on any device.

    Equal lengths need no padding; images of different sizes would need too much.
    """
    attend = partial(
        scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    if len(segments.lengths) == 1:
        return attend(query, key, value).transpose(1, 2)
    rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]  # [T, H, D]
    runs = segments.runs()
    padding = segments.padding(query.device) if len(runs) > 1 else None
    if padding is not None:
        shape = (len(segments.lengths), segments.longest)
        padded = [_batch(states.index_select(0, padding.taken), *shape) for states in rows]
        output = attend(*padded, attn_mask=padding.mask.to(query.dtype))
        return output.transpose(1, 2).flatten(0, 1).index_select(0, padding.put).unsqueeze(0)
    sizes = [length * count for length, count in runs]
    pieces = zip(*(states.split(sizes) for states in rows), strict=True)
    outputs = [
        attend(*(_batch(states, count, length) for states in piece)).transpose(1, 2).flatten(0, 1)
        for (length, count), piece in zip(runs, pieces, strict=True)
    ]
    return torch.cat(outputs).unsqueeze(0)


def _batch(states: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return states[count * length, H, D] as [count, H, length, D]."""
    return states.reshape(count, length, *states.shape[1:]).transpose(1, 2)


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


def reset_attention(config: PreTrainedConfig) -> None:
    """Take back what `attend_by_segments` chose for a model of this configuration, before another is made of it.

    The library would look for a kernel of that name to download.
    """
    kernels = {name: kernel for kernel, name in SEGMENTS.items()}
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None and part._attn_implementation in kernels:
            kernel = kernels[part._attn_implementation]
            part._attn_implementation = kernel if kernel in FLASH else "sdpa"


def takes_segments(tower: nn.Module) -> bool:
    """Return whether a tower hands cumulative lengths to attention functions that are called "flash..."."""
    codes = [inspect.unwrap(forward).__code__ for forward in {type(module).forward for module in tower.modules()}]
    asking = [code for code in codes if is_flash_attention_requested.__name__ in code.co_names]
    return bool(asking) and all(
        any(isinstance(names, tuple) and "cu_seq_lens_q" in names for names in code.co_consts) for code in asking
    )
