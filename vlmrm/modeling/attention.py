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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from vlmrm.batching import PaddedBatcher, SharedBatcher
from vlmrm.batching.shared import PackedLayout, RotaryPositions, on_device
from vlmrm.errors import ConfigError
from vlmrm.libraries import install_command, relies_on
from vlmrm.modeling.families import BY_INDEX
from vlmrm.modeling.kernels import FLASH, TORCH, along, attend, log_once
from vlmrm.modeling.masks import REFERENCE, MaskRule, mask_rule
from vlmrm.modeling.reward_model import RewardModel

logger = logging.getLogger("vlmrm")

relies_on(PreTrainedConfig, "_attn_implementation")
relies_on(sdpa_mask, *inspect.signature(mask_rule).parameters.keys() - {"keywords"})  # the interface of masks

ATTENTION = ("auto", *FLASH, "sdpa")
BATCHINGS = ("shared", "reference")
# Not "flash...": transformers takes any name with that word in it for FlashAttention, also in the vision tower.
SHARED_PREFIX = "shared_prefix"
# By the kernel under it, for half precision on CUDA.
SHARED = {TORCH: SHARED_PREFIX, **{kernel: f"{SHARED_PREFIX}_{kernel[-1]}" for kernel in FLASH}}

# Keywords without effect here: positions are in the queries and keys already, no key is kept for later, and outputs
# beside the hidden states are for the layers around.
WITHOUT_EFFECT = ("position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits")


def resolve_attention(name: str) -> str:
    """Return what `name` means here: FlashAttention 3 or 2 where it is installed, else PyTorch's `sdpa`.

    The next kernel that is here replaces a missing one, and one log line says so; `auto` is the best.
    """
    if name not in ATTENTION:
        raise ConfigError(f"attn_implementation is {name!r}: choose one of {', '.join(ATTENTION)}.")
    if name == "sdpa":
        return "sdpa"
    kernels = list(FLASH)[0 if name == "auto" else list(FLASH).index(name) :]
    missing = {kernel: reason for kernel in kernels if (reason := _missing_for(kernel)) is not None}
    kernel = next((kernel for kernel in kernels if kernel not in missing), "sdpa")
    if name == "auto" and kernel == "sdpa":
        log_once(f"attn_implementation: sdpa, because {missing['flash_attention_2']}", logging.WARNING)
    elif name in missing:
        log_once(f"attn_implementation: {kernel} instead of {name}, because {missing[name]}", logging.WARNING)
    return kernel


def _missing_for(kernel: str) -> str | None:
    """Return what FlashAttention lacks here; None where it can run."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if kernel == "flash_attention_3":
        return None if is_flash_attn_3_available() else "flash-attn-3 is not installed"
    return None if is_flash_attn_2_available() else f"flash-attn is not installed: {install_command('flash')}"


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the kernel that the language model runs with now."""
    return model.config.get_text_config()._attn_implementation


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Run the language model with the attention of this name, and leave that of the towers as it is."""
    model.set_attn_implementation({"text_config": name})
    if attention_of(model) != name:
        model.set_attn_implementation({"": name})  # one configuration for all
    if attention_of(model) != name:
        raise ConfigError(f"{type(model).__name__} computes attention in its own way, not by {name}: {REFERENCE}.")


def sequence_limit(config: PreTrainedConfig, max_seq_length: int | None) -> int:
    """Return the longest conversation in tokens: `max_seq_length`, or all that the model has positions for."""
    positions = config.get_text_config().max_position_embeddings
    if max_seq_length is not None and max_seq_length > positions:
        raise ConfigError(f"max_seq_length is {max_seq_length}, but the model has {positions} positions: lower it.")
    return max_seq_length or positions


def batcher_for(model: RewardModel, processor: Any, batching: str) -> SharedBatcher | PaddedBatcher:
    """Return the batcher for `batching`; for `shared`, also give the language model the attention that goes with it.

    Call it once, before training or scoring: attention that changes between a forward and its recomputation under
    checkpointing gives wrong gradients.
    """
    if batching not in BATCHINGS:
        raise ConfigError(f"batching is {batching!r}: choose from {', '.join(BATCHINGS)}.")
    if batching == "shared":
        reason = not_shared(model)
        if reason is None and not (model.family.tested or model.proved):
            reason = "no test covers it, and it has not proved that it can share prefixes (check_sight)"
        if reason is None:
            return share(model)
        logger.warning("batching: reference for %s, because %s", model.family.name, reason)
    return padded_batcher(model, processor)


def padded_batcher(model: RewardModel, processor: Any) -> PaddedBatcher:
    """Return the batcher of padded batches for a model."""
    positions = RotaryPositions(type(model.model), model.config) if model.family.positions_of_batch else None
    return PaddedBatcher.for_processor(processor, model.type_names, positions)


def share(model: RewardModel) -> SharedBatcher:
    """Prepare a model for shared batches, and return their batcher. Calling it again does nothing more."""
    from vlmrm.modeling.state import fork_states

    if (attention := attention_of(model)) not in SHARED.values():
        use_attention(model, SHARED.get(attention, SHARED_PREFIX))
    fork_states(model)
    prune_last_layer(model.language_model)
    return SharedBatcher.of(model)


def not_shared(model: RewardModel) -> str | None:
    """Return why a model cannot share prefixes; None where it can.

    One of a family that the tests do not cover may try, in the proof of sight, and has to prove itself there.
    """
    if reason := model.family.padded or model.padded_because:
        return reason
    if "mm_encoder_outputs" not in model.input_names or "position_ids" not in model.input_names:
        return "its backbone does not take features of images and positions apart"
    if any(type(module).__name__.endswith("Indexer") for module in model.language_model.modules()):
        return BY_INDEX
    from vlmrm.modeling.state import unknown_state_layers

    if layers := unknown_state_layers(model):
        return f"its layers {', '.join(layers)} carry a state that cannot be forked here"
    return None


def shared_prefix(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    flash: str = TORCH,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over a packed row: query[1, H, T, D], key[1, KV, T, D], value[1, KV, T, V] → [1, T, H, V].

    Keys and values of cached prefixes come before the row's; those of the layout's prefixes to keep are stored there.

    `attention_mask` is the rule that the family's mask became; without one it is causal. `softcap` bounds scores by
    `softcap * tanh(score / softcap)`; `s_aux` [H] are attention sinks, further scores of each softmax without a value.
    `flash` is the variable-length kernel for half precision on CUDA.
    The kernel follows from the device, the type and what there is to compute.
    """
    # transformers passes new features as keywords: an unknown one must not be dropped silently.
    refused = [name for name, value in keywords.items() if value is not None and name not in WITHOUT_EFFECT]
    if layout is None or query.shape[2] != len(layout) or key.shape[2] != len(layout):
        refused.append("attention without the layout of its tokens")
        raise _refusal(refused, module)
    rule = attention_mask if isinstance(attention_mask, MaskRule) else None
    if attention_mask is not None and rule is None:
        refused.append("attention_mask")
    if rule is not None and rule.plain:
        rule = None
    if rule is None and (is_causal is False or getattr(module, "is_causal", True) is False):
        refused.append("is_causal=False")
    # The mask decides what is computed: a window that only the layer knows would be ignored without a word.
    seen = layout.longest if rule is None else rule.window
    if sliding_window is not None and seen is not None and sliding_window != seen and sliding_window < layout.longest:
        refused.append(f"sliding_window={sliding_window} over {seen} tokens")
    if refused:
        raise _refusal(refused, module)
    query = _temperature_along_path(module, query, layout)
    own = key, value  # prefixes to keep are of this row: their ranges do not count the held keys
    if held := layout.take():
        key = torch.cat([*(keys for keys, _ in held), key], dim=2)
        value = torch.cat([*(values for _, values in held), value], dim=2)
    numbers: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "sinks": s_aux}
    output = attend(query, key, value, layout, rule, flash=flash, **numbers)
    layout.put(lambda keep: tuple(along(states, keep.ranges, copy=True) for states in own))
    if rule is not None and rule.reads_rows:
        layout.refuse("mask")  # it reads what the row says of each key: a later row says nothing of those held
    return output, None


def _refusal(refused: Sequence[str], module: nn.Module) -> ConfigError:
    names = ", ".join(refused)
    return ConfigError(f"batching: shared does not compute {names} of {type(module).__name__}: {REFERENCE}.")


def _temperature_along_path(module: Any, query: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Rescale queries [1, H, T, D] to the temperature of their positions in the conversation, not in the row.

    Llama 4 scales them by a step function of the position, from `floor_scale` on, in layers without rotary positions.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope or len(layout) < module.floor_scale:
        return query

    def temperature(positions: np.ndarray) -> np.ndarray:
        return 1 + module.attn_scale * np.log1p((positions + 1) // module.floor_scale)

    ratio = temperature(layout.positions()) / temperature(np.arange(len(layout)))
    return query * on_device(torch.as_tensor(ratio).to(query.dtype), query.device)[:, None]


for _kernel, _name in SHARED.items():
    AttentionInterface.register(_name, partial(shared_prefix, flash=_kernel))
    AttentionMaskInterface.register(_name, mask_rule)


def prune_last_layer(language_model: Any) -> None:
    """Compute the last layer's feed-forward part for scored tokens alone; calling it again does nothing.

    After the last attention no token sees another, so nothing reads the hidden states of unscored ones. Hooks do it
    for packed rows alone: their layout has the positions. Scores and gradients are unchanged.
    """
    layer = getattr(language_model, "layers", [None])[-1]
    mixer = getattr(layer, "self_attn", None) or getattr(layer, "linear_attn", None)
    mlp = getattr(layer, "mlp", None)
    # Experts are not pruned: figures and losses of their routers are over all tokens.
    if mixer is None or hasattr(layer, "ends") or not type(mlp).__name__.endswith("MLP") or hasattr(mlp, "experts"):
        return
    layer.ends = ends = _Ends()
    mixer.register_forward_pre_hook(ends, with_kwargs=True)
    layer.mlp.register_forward_pre_hook(ends.select)
    layer.mlp.register_forward_hook(ends.restore)


@dataclass(eq=False)
class _Ends:
    """Hooks that select the last tokens of the current row's conversations, and put them back.

    The layout comes with each call of the layer's attention, so checkpointing's recomputation has the right one; hooks
    of the layer itself are outside of it, and would keep that of the latest batch.
    """

    layout: PackedLayout | None = None

    def __call__(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("layout")

    def select(self, mlp: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Return hidden[1, T, H] at the ends, [1, N, H]."""
        if self.layout is None:
            return None
        return (args[0].index_select(1, self.layout.ends(args[0].device)),)

    def restore(self, mlp: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
        """Return the ends' output [1, N, H] at their positions in [1, T, H], with zeros elsewhere."""
        layout, self.layout = self.layout, None  # what it holds is not kept after its row
        if layout is None:
            return None
        row = output.new_zeros(1, len(layout), output.shape[2])
        return row.index_copy(1, layout.ends(output.device), output)
