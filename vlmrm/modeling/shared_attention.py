"""Attention over a packed row of segments, registered with transformers by name and chosen when a model is loaded.

Each segment sees itself, causally, and the segments before it on its path (`vlmrm.batching.layout`). No model is
patched: the layout comes as a keyword through the library's own forward, decoder layers and checkpointing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vlmrm.batching.layout import Layout

# Not "flash...": transformers takes any name with that word in it for FlashAttention, also in the vision tower.
PER_SEGMENT = "shared_prefix_per_segment"
VARLEN = "shared_prefix_varlen"


def per_segment(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: Layout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One call of torch's attention a segment: query[1, H, T, D], key and value[1, KV, T, D] → [1, T, H, D].

    Runs anywhere. A dense mask over the row would compute the square of all its documents instead.
    """
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    for span in layout.spans:
        keys, values = (_along(states, span.keys) for states in (key, value))
        mask = layout.mask(span, query.device) if span.before else None
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, span.start : span.stop],
                keys,
                values,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: Layout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One call of torch's variable-length attention for all segments, over keys gathered for each; shapes as above.

    On CUDA, in half precision. Causal with cu_queries ≠ cu_keys is aligned to the bottom right, which is what a
    segment after its path needs.
    """
    from torch.nn.attention.varlen import varlen_attn

    gathered = layout.gathered(query.device)
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    output = varlen_attn(
        queries.contiguous(),
        keys.index_select(0, gathered.keys),
        values.index_select(0, gathered.keys),
        gathered.cu_queries,
        gathered.cu_keys,
        gathered.max_queries,
        gathered.max_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output[None], None


def _along(states: torch.Tensor, ranges: Any) -> torch.Tensor:
    """states[1, H, T, D] at the ranges of positions, without a copy where there is one range."""
    pieces = [states[:, :, start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


AttentionInterface.register(PER_SEGMENT, per_segment)
AttentionInterface.register(VARLEN, varlen)
