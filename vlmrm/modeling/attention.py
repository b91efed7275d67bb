"""Attention: the kernels that a model runs with, and attention over packed rows.

Shared attention is registered with transformers by name and chosen when a model is loaded. No model is patched: the
layout of a row (`vlmrm.batching.shared`) comes as a keyword through the library's own forward, decoder layers and
checkpointing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from vlmrm.batching import PaddedBatcher, SharedBatcher
from vlmrm.batching.shared import PackedLayout
from vlmrm.errors import ConfigError
from vlmrm.libraries import install_command, relies_on
from vlmrm.modeling.reward_model import RewardModel

logger = logging.getLogger("vlmrm")

relies_on(PreTrainedConfig, "_attn_implementation")

ATTENTION = ("auto", "flash_attention_2", "sdpa")
BATCHINGS = ("shared", "reference")
# Not "flash...": transformers takes any name with that word in it for FlashAttention, also in the vision tower.
SHARED_PREFIX = "shared_prefix"

# Keywords without effect here: positions are in the queries and keys already, and no key is kept for later.
WITHOUT_EFFECT = ("position_ids", "use_cache")
KERNEL_KEYWORDS = ("scale", "window_size", "enable_gqa")


def resolve_attention(name: str) -> str:
    """Return the kernel for `name`: `auto` is flash attention where it can run, else PyTorch's `sdpa`.

    Raises:
        ConfigError: when flash attention is requested by name and cannot run here, or the name is unknown.
    """
    if name not in ATTENTION:
        raise ConfigError(f"attn_implementation is {name!r}: choose one of {', '.join(ATTENTION)}.")
    if name == "sdpa":
        return "sdpa"
    missing = _missing_for_flash()
    if missing is None:
        return "flash_attention_2"
    if name == "flash_attention_2":
        raise ConfigError(
            f"attn_implementation is flash_attention_2, but {missing}, or write attn_implementation: auto."
        )
    _warn_once(f"attn_implementation: sdpa, because {missing}")
    return "sdpa"


@cache  # each model of a process resolves its attention
def _warn_once(line: str) -> None:
    logger.warning(line)


def _missing_for_flash() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU: run on one"
    if not is_flash_attn_2_available():
        return f"flash-attn is not installed: {install_command('flash')}"
    return None


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the kernel that the language model runs with now."""
    return model.config.get_text_config()._attn_implementation


def sequence_limit(config: PreTrainedConfig, max_seq_length: int | None) -> int:
    """Return the longest conversation in tokens: `max_seq_length`, or all that the model has positions for.

    Raises:
        ConfigError: when `max_seq_length` is more than that.
    """
    positions = config.get_text_config().max_position_embeddings
    if max_seq_length is not None and max_seq_length > positions:
        raise ConfigError(f"max_seq_length is {max_seq_length}, but the model has {positions} positions: lower it.")
    return max_seq_length or positions


def batcher_for(model: RewardModel, processor: Any, batching: str) -> SharedBatcher | PaddedBatcher:
    """Return the batcher for `batching`; for `shared`, also give the language model the attention that goes with it.

    Call it once, before training or scoring: attention that changes between a forward and its recomputation under
    checkpointing gives wrong gradients.

    Raises:
        ConfigError: when there is no such batching, or this torch lacks a feature that shared attention needs.
    """
    if batching not in BATCHINGS:
        raise ConfigError(f"batching is {batching!r}: choose from {', '.join(BATCHINGS)}.")
    if batching == "shared" and (reason := not_shared(model)):
        logger.warning("batching: reference, because shared attention does not know %s", reason)
    elif batching == "shared":
        check_kernel()
        model.set_attn_implementation({"text_config": SHARED_PREFIX})
        prune_last_layer(model.model.language_model)
        return SharedBatcher.of(model)
    return PaddedBatcher.for_processor(processor, model.type_names)


def not_shared(model: RewardModel) -> str | None:
    """Return the property of the model that keeps it from shared batches; None where there is none."""
    if reason := model.family.padded or model.padded_because:
        return reason
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windowed and window < config.max_position_embeddings:
        return f"the sliding window of {window} tokens in its layers"
    return None


def check_kernel() -> None:
    """Refuse a torch whose variable-length attention lacks a keyword that `varlen` passes.

    Raises:
        ConfigError: naming the missing keywords.
    """
    parameters = inspect.signature(varlen_attn).parameters
    if missing := [name for name in KERNEL_KEYWORDS if name not in parameters]:
        raise ConfigError(
            f"batching: shared needs torch 2.12 or newer, and varlen_attn of torch {torch.__version__} does not know "
            f"{', '.join(missing)}: install a newer torch, or write batching: reference."
        )


def shared_prefix(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: PackedLayout,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over a packed row: query[1, H, T, D], key and value[1, KV, T, D] → [1, T, H, D].

    The kernel follows from the device and the type.

    Raises:
        ConfigError: for a window, a mask or any other keyword that changes attention and is not computed here.
    """
    # transformers passes new features as keywords: an unknown one must not be dropped silently.
    refused = [name for name, value in keywords.items() if value is not None and name not in WITHOUT_EFFECT]
    if attention_mask is not None:
        refused.append("attention_mask")
    if sliding_window is not None and sliding_window < layout.longest:
        refused.append(f"sliding_window={sliding_window} over {layout.longest} tokens")
    if refused:
        raise ConfigError(
            f"batching: shared does not compute {', '.join(refused)} of {type(module).__name__}: write batching: "
            "reference."
        )
    if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return varlen(query, key, value, layout, scaling), None
    return per_segment(query, key, value, layout, scaling, dropout), None


def per_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Call torch's attention once per span; on any device, in any type.

    A dense mask over the row would compute the full T x T square of all its conversations instead.
    """
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    # Split, not sliced: the backward of each slice would add a whole row of zeros.
    queries = query.split([span.stop - span.start for span in layout.spans], dim=2)
    for span, span_query in zip(layout.spans, queries, strict=True):
        mask = layout.mask(span, query.device) if span.before else None
        outputs.append(
            scaled_dot_product_attention(
                span_query,
                _along(key, span.keys),
                _along(value, span.keys),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            ).transpose(1, 2)
        )
    return torch.cat(outputs, dim=1)


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scaling: float | None
) -> torch.Tensor:
    """Call torch's variable-length attention once for all spans, over the keys gathered for each.

    For CUDA in half precision. Its causal mask is aligned to the bottom right, as a segment after its path needs.
    """
    gathered = layout.gathered(query.device)
    # Under autocast the rotary embedding promotes queries and keys to float32, which the kernel does not take.
    queries, keys, values = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    output: Any = varlen_attn(
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
    return output.unsqueeze(0)


def _along(states: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return states[1, H, T, D] at the ranges of positions, without a copy where there is one range."""
    pieces = [states[:, :, start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


AttentionInterface.register(SHARED_PREFIX, shared_prefix)


def prune_last_layer(language_model: Any) -> None:
    """Compute the last layer's feed-forward part for the tokens that are scored alone; calling it again does nothing.

    After the last attention no token sees another, so nothing reads the hidden states of unscored ones. Hooks do it,
    for packed rows alone, whose layout has the positions. Scores and gradients are unchanged.
    """
    layer = language_model.layers[-1]
    if hasattr(layer, "ends"):
        return
    layer.ends = ends = _Ends()
    layer.register_forward_pre_hook(ends, with_kwargs=True)
    layer.mlp.register_forward_pre_hook(ends.select)
    layer.mlp.register_forward_hook(ends.restore)


@dataclass(eq=False)
class _Ends:
    """Hooks that select the last tokens of the current row's conversations, and put them back.

    The layout comes with each call of the layer, so checkpointing's recomputation has the right one.
    """

    layout: PackedLayout | None = None

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("layout")

    def select(self, mlp: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Return hidden[1, T, H] at the ends, [1, N, H]."""
        if self.layout is None:
            return None
        return (args[0].index_select(1, self.layout.ends(args[0].device)),)

    def restore(self, mlp: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        """Return the ends' output [1, N, H] at their positions in [1, T, H], with zeros elsewhere."""
        if self.layout is None:
            return None
        row = output.new_zeros(1, len(self.layout), output.shape[2])
        return row.index_copy(1, self.layout.ends(output.device), output)
