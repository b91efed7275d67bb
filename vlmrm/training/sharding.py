"""FSDP2: PyTorch shares out the weights, gradients and optimizer state of a run among its ranks.

accelerate shards the model (`fsdp2_prepare_model`) and saves it whole, so that a checkpoint is that of any other run.
Here is what it must be told of a reward model.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import get_module_class_from_name
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on
from vlmrm.modeling.head import Float32Linear
from vlmrm.modeling.reward_model import RewardModel

NEEDED = {MixedPrecisionPolicy: "param_dtype_override_fn", FSDPModule: "set_reduce_scatter_unused_params"}
relies_on(
    FullyShardedDataParallelPlugin,
    attributes=("mixed_precision_policy", "transformer_cls_names_to_wrap", "cpu_ram_efficient_loading"),
)


def describe(plugin: Any, model: nn.Module, reward_model: RewardModel, half: torch.dtype | None) -> None:
    """Tell accelerate's plugin what to shard apart and what to compute in `half` (None: in float32).

    `model` is `reward_model`, or the adapters around it. Call it before accelerate prepares the model.
    """
    for owner, name in NEEDED.items():
        if not hasattr(owner, name):
            raise ConfigError(
                f"fsdp needs {name} of torch's {owner.__name__}, which torch {torch.__version__} does not have: "
                "install torch 2.15 or newer, or use deepspeed: zero3.json."
            )
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = layer_classes(model)
    if not any(type(module).__name__ in plugin.transformer_cls_names_to_wrap for module in _layers(reward_model)):
        raise ConfigError(
            f"fsdp: {type(reward_model).__name__} does not say which of its layers are sharded apart: name their "
            "class in fsdp_config as transformer_layer_cls_to_wrap, or use deepspeed: zero3.json."
        )
    if plugin.cpu_ram_efficient_loading and (kept := _buffers_in_checkpoints(model)):
        raise ConfigError(
            f"fsdp_config: cpu_ram_efficient_loading does not carry {kept[0]} of {type(reward_model).__name__}: "
            "remove it, and every process reads the weights."
        )
    plugin.mixed_precision_policy = precision(model, half)


def layer_classes(model: Any) -> list[str]:
    """Return the names of the classes that transformers never splits, of those that the model has.

    It also names those of other models of the family, such as the text model of CLIP, which accelerate would miss.
    """
    names = sorted(getattr(model, "_no_split_modules", None) or ())
    return [name for name in names if get_module_class_from_name(model, name) is not None]


def _layers(model: RewardModel) -> list[nn.Module]:
    lists = [module for module in model.language_model.modules() if isinstance(module, nn.ModuleList)]
    return [layer for layers in lists for layer in layers]


def _buffers_in_checkpoints(model: nn.Module) -> list[str]:
    saved = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in saved]


def precision(model: nn.Module, half: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the types that FSDP computes in: layers in `half`, the head and sums of gradients in float32.

    accelerate's own policy would round scores and gradients to `half`. Inputs stay as they are: to cast them, torch
    makes every layer a copy of the row's layout, and rounds positions.
    """

    def keep(weight: nn.Parameter) -> torch.dtype | None:
        heads = [module for module in model.modules() if isinstance(module, Float32Linear)]
        return weight.dtype if any(weight is own for head in heads for own in head.parameters(False)) else None

    return MixedPrecisionPolicy(
        param_dtype=half,
        reduce_dtype=None if half is None else torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,
        param_dtype_override_fn=keep if half is not None else None,
    )


def reduce_all(model: Any, reward_model: RewardModel) -> None:
    """Let ranks reduce the gradients of all weights, where a batch need not reach all of them.

    Ranks whose batches reach other weights would otherwise wait for each other for ever.
    """
    if not reward_model.family.trains_all:
        model.set_reduce_scatter_unused_params(True)


def own_part(weight: Any) -> torch.Tensor:
    """Return what this rank holds of a weight: under ZeRO-3 and FSDP2 a part of it."""
    weight = getattr(weight, "ds_tensor", weight)
    return weight.to_local() if isinstance(weight, DTensor) else weight
