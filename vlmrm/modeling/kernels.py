"""Compute attention over packed rows: the kernels, and the rule that chooses one.

For CUDA in half precision the tokens of many sequences stand side by side, with their cumulative lengths, for
FlashAttention 3 or 2 where one is chosen, else torch's own. Masks are aligned to the bottom right.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from vlmrm.batching.shared import PackedLayout
from vlmrm.libraries import relies_on
from vlmrm.modeling.masks import MaskedSpan, MaskRule, plain_spans

logger = logging.getLogger("vlmrm")

relies_on(varlen_attn, "scale", "window_size")
# The GPU benchmark also runs beside torch 2.11, which has no such keyword and groups heads unasked.
GROUPS_IF_ASKED = "enable_gqa" in inspect.signature(varlen_attn).parameters

# The kernels by transformers' names for them, best first, and the modules that have them.
FLASH = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
TORCH = "varlen_attn"
WIDEST_HEAD = 256  # that the kernels for half precision on CUDA take
NARROWEST_HEAD = 16  # that FlexAttention takes


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    rule: MaskRule | None,
    *,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    flash: str = TORCH,
) -> torch.Tensor:
    """Attend over a packed row with the kernel of `kernel_for`: query[1, H, T, D] → [1, T, H, V].

    key is [1, KV, T, D], value [1, KV, T, V]. `softcap` bounds scores by `softcap * tanh(score / softcap)`; `sinks`
    [H] are further scores of each softmax, without a value. `flash` is the kernel under `varlen`.
    """
    widths = query.shape[3], value.shape[3]
    kernel = kernel_for(value.device.type, value.dtype, widths, rule, softcap is None and sinks is None, dropout)
    log_once(f"shared attention: {flash if kernel == 'varlen' else kernel} for {value.dtype} on {value.device.type}")
    if kernel == "varlen":
        return varlen(query, key, value, layout, scaling, rule, flash)
    if kernel == "flex":
        return flex(query, key, value, layout, rule, scaling, softcap, sinks)
    if kernel == "sdpa":
        return per_segment(query, key, value, layout, scaling, dropout, rule)
    return explicit(query, key, value, layout, rule, scaling, dropout, softcap, sinks)


def kernel_for(
    device: str, dtype: torch.dtype, widths: tuple[int, int], rule: MaskRule | None, plain: bool, dropout: float
) -> str:
    """Return the kernel for tensors of this type, with heads of the `widths` of keys and values.

    On CUDA in half precision without dropout: `varlen`, one call for all spans, where masks are causal or windows;
    `flex` for masks that it cannot express. Elsewhere a call per span: torch's own (`sdpa`), or `explicit`, which
    knows soft caps and sinks (not `plain`).
    """
    half = device == "cuda" and dtype in (torch.bfloat16, torch.float16) and not dropout and max(widths) <= WIDEST_HEAD
    if half and plain and widths[0] == widths[1] and (rule is None or rule.window is not None):
        return "varlen"
    if half and min(widths) >= NARROWEST_HEAD:
        return "flex"
    return "sdpa" if plain else "explicit"


@cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line once in this process."""
    logger.log(level, line)


def per_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    dropout: float,
    rule: MaskRule | None = None,
) -> torch.Tensor:
    """Call torch's attention once per span; on any device, in any type.

    A dense mask over the row would compute the full T x T square of all its conversations instead.
    """
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    for span, queries in _queries(query, _spans(layout, rule, query.device)):
        outputs.append(
            scaled_dot_product_attention(
                queries,
                along(key, span.keys),
                along(value, span.keys),
                attn_mask=span.mask,
                dropout_p=dropout,
                is_causal=span.mask is None,
                scale=scaling,
                enable_gqa=grouped,
            ).transpose(1, 2)
        )
    return torch.cat(outputs, dim=1)


def explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    rule: MaskRule | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the softmax once per span, with soft caps and sinks; on any device, in any type."""
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    outputs = []
    for span, queries in _queries(query, _spans(layout, rule, query.device)):
        grouped = queries.unflatten(1, (heads, groups))  # [1, KV, H / KV, queries, D]
        scores = scale * grouped @ along(key, span.keys).unsqueeze(2).transpose(3, 4)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        mask = span.mask
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, heads, groups, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        if sinks is not None:
            weights = weights[..., :-1]
        weights = drop(weights.to(value.dtype), dropout)
        outputs.append((weights @ along(value, span.keys).unsqueeze(2)).flatten(1, 2).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    rule: MaskRule | None = None,
    flash: str = TORCH,
) -> torch.Tensor:
    """Call a variable-length kernel once for all spans, over the keys gathered for each.

    For CUDA in half precision. Its causal mask is aligned to the bottom right, as a segment after its path needs; a
    window counts back from there along the path.
    """
    gathered = layout.gathered(query.device)
    # Under autocast the rotary embedding promotes queries and keys to float32, which the kernel does not take.
    queries, keys, values = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    output = attend_varlen(
        flash,
        queries.contiguous(),
        keys.index_select(0, gathered.keys),
        values.index_select(0, gathered.keys),
        gathered.cu_queries,
        gathered.cu_keys,
        gathered.max_queries,
        gathered.max_keys,
        scaling=scaling,
        causal=True,
        window=None if rule is None else rule.window,
    )
    return output.unsqueeze(0)


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    rule: MaskRule | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Call FlexAttention with the row's mask, for what `varlen` cannot express. For CUDA in half precision.

    A sink takes its share after the softmax, from the logarithm of its sum: in float32, where the
    library's own function rounds the logarithm to half precision.
    """
    output = compiled_flex()(
        query.to(value.dtype),  # see `varlen`
        key.to(value.dtype),
        value,
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
        block_mask=block_mask(layout, rule, query.device),
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        # Its kernel for decoding, which it would choose by itself, has no block for 64 to 127 tokens of grouped heads.
        kernel_options={"BACKEND": "TRITON"},
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        output, auxiliary = output
        output = (output * torch.sigmoid(auxiliary.lse - sinks.float()[:, None])[..., None]).to(value.dtype)
    return output.transpose(1, 2).contiguous()


@cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


_block_masks: WeakKeyDictionary[PackedLayout, dict[MaskRule | None, BlockMask]] = WeakKeyDictionary()


def block_mask(layout: PackedLayout, rule: MaskRule | None, device: torch.device) -> BlockMask:
    """Return the mask of the row for FlexAttention, made once for all layers. It takes T * K bytes."""
    made = _block_masks.setdefault(layout, {})
    if rule not in made:
        mask = dense(layout, rule, device)
        made[rule] = create_block_mask(
            lambda batch, head, query, key: mask[query, key], None, None, *mask.shape, device=str(device)
        )
    return made[rule]


def dense(layout: PackedLayout, rule: MaskRule | None, device: torch.device) -> torch.Tensor:
    """Return the row's mask, boolean [T, K]: True where a query attends. Held keys come before the row's."""
    mask = torch.zeros(len(layout), layout.before + len(layout), dtype=torch.bool, device=device)
    for span in _spans(layout, rule, device):
        size = span.stop - span.start, sum(stop - start for start, stop in span.keys)
        allowed = torch.ones(size, dtype=torch.bool, device=device).tril() if span.mask is None else span.mask
        pieces = allowed.split([stop - start for start, stop in span.keys], dim=1)
        for (start, stop), piece in zip(span.keys, pieces, strict=True):
            mask[span.start : span.stop, start:stop] = piece
    return mask


def _spans(layout: PackedLayout, rule: MaskRule | None, device: torch.device) -> list[MaskedSpan]:
    return plain_spans(layout, device) if rule is None else rule.spans(layout, device)


def _queries(query: torch.Tensor, spans: list[MaskedSpan]) -> list[tuple[MaskedSpan, torch.Tensor]]:
    # Split, not sliced: the backward of each slice would add a whole row of zeros.
    return list(zip(spans, query.split([span.stop - span.start for span in spans], dim=2), strict=True))


def along(states: torch.Tensor, ranges: Sequence[tuple[int, int]], *, copy: bool = False) -> torch.Tensor:
    """Return states[1, H, T, D] at the ranges of positions, without a copy where there is one range, unless asked."""
    pieces = [states[:, :, start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 and not copy else torch.cat(pieces, dim=2)


# Variable lengths ----------------------------------------------------------------------------------------------------


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
    grouped: dict[str, Any] = {"enable_gqa": key.shape[1] != query.shape[1]} if GROUPS_IF_ASKED else {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # not cuDNN, which plans anew for each number of tokens
        output = varlen_attn(query, key, value, *lengths, scale=scaling, window_size=sides, **grouped)
    assert isinstance(output, torch.Tensor)
    return output
