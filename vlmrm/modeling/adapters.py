"""LoRA and QLoRA: which layers of each part of a reward model are adapted, and what else trains."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from vlmrm.errors import ConfigError
from vlmrm.libraries import missing, relies_on
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.experts import expert_weights, find_routers
from vlmrm.modeling.families import LANGUAGE_MODELS, existing_parts
from vlmrm.modeling.parts import (
    HEAD_MODULES,
    IN_WORDS,
    MERGER,
    VISION,
    family_in,
    language_model_path,
    linear_layers,
    marks,
    part_names,
)
from vlmrm.modeling.reward_model import RewardModel

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger("vlmrm")


def lora_config(arguments: ModelArguments, model: RewardModel) -> LoraConfig:
    """Return LoRA's configuration: the layers to adapt, and what trains in full beside them, the head at least.

    Those of the language model are all linear ones, or those of `lora_target_modules`, which may name routers too;
    experts are adapted with `lora_experts`, all linear layers of the tower with `lora_vit` and of the merger with
    `lora_merger`. The log says what is left. `freeze_merger: false` trains the merger in full.
    """
    from peft import LoraConfig, TaskType

    layers, parameters = ([], []) if arguments.freeze_llm else _language_model_targets(arguments, model)
    for key, part in (("lora_vit", VISION), ("lora_merger", MERGER)):
        if getattr(arguments, key):
            linear = list(linear_layers(model, part))
            if not linear:
                raise ConfigError(
                    f"{key}: the {IN_WORDS[part]} of {type(model.model).__name__} has no linear layers under a known "
                    f"name (its parts are {part_names(model.model)}): remove it."
                )
            layers += linear
    if not layers and not parameters:
        raise ConfigError(
            "use_peft: true adapts nothing with freeze_llm: true: add lora_vit or lora_merger, or remove freeze_llm."
        )
    keep_adapters_names()
    pattern = pattern_of(layers)  # a list of names would also match those that end in them
    matched = (name for name, _ in model.named_modules() if re.fullmatch(pattern, name))
    return LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=pattern or [],
        exclude_modules=[name for name in matched if name not in layers] or None,  # between others in a sequence
        target_parameters=parameters or None,
        modules_to_save=[
            *(name for name in HEAD_MODULES if hasattr(model, name)),
            *(merger_modules(model) if arguments.freeze_merger is False else ()),
        ],
    )


def merger_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that make up the merger, none of them a list."""
    backbone, family = model.get_submodule("model"), family_in(model)
    paths = [path for path in family.mergers if existing_parts(backbone, [path])]
    if not paths:
        raise ConfigError(
            f"freeze_merger: false: {type(backbone).__name__} has no merger under a known name (its parts are "
            f"{part_names(backbone)}): remove it."
        )
    if left := marks(model):
        logger.warning("freeze_merger: false leaves %s as it is: adapters train modules", ", ".join(left))
    return [f"model.{name}" for path in paths for name in _without_lists(path, backbone.get_submodule(path))]


def _without_lists(path: str, module: nn.Module) -> list[str]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [path]
    return [name for child, inner in module.named_children() for name in _without_lists(f"{path}.{child}", inner)]


def pattern_of(names: Iterable[str]) -> str:
    """Return a pattern that matches these full names, with any number for a layer's number."""
    forms = {re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(name)) for name in names}
    return "|".join(sorted(forms))


def _language_model_targets(arguments: ModelArguments, model: RewardModel) -> tuple[list[str], list[str]]:
    """Return the names of the layers of the language model to adapt, and those of its tensors that are in no layer."""
    path = language_model_path(model)
    language_model = model.get_submodule(path)
    routers = _router_weights(language_model)
    linear = {name for name, module in language_model.named_modules() if isinstance(module, nn.Linear)}
    linear = {name for name in linear if not any(f"{name}.".startswith(f"{router}.") for router in routers)}
    layers = set(map(_last, linear))
    named = set(arguments.lora_target_modules or layers)
    if unknown := named - layers - set(map(_last, routers)):
        raise ConfigError(
            f"lora_target_modules names {', '.join(sorted(unknown))}: the language model has "
            f"{', '.join(sorted(layers | set(map(_last, routers))))}."
        )
    experts = expert_weights(language_model)
    if arguments.lora_experts and not experts:
        raise ConfigError(f"lora_experts: {type(language_model).__name__} has no tensors of experts: remove it.")
    if experts and not arguments.lora_experts:
        logger.info("LoRA leaves the experts as they are (%d tensors): lora_experts: true adapts them", len(experts))
    if experts and arguments.load_in_4bit:
        logger.warning(
            "load_in_4bit leaves the experts as they are (%d tensors): it is for linear layers", len(experts)
        )
    parameters = experts if arguments.lora_experts else []
    parameters += [weight for router, weights in routers.items() if _last(router) in named for weight in weights]
    return ([f"{path}.{name}" for name in linear if _last(name) in named], [f"{path}.{name}" for name in parameters])


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _router_weights(language_model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the matrices of each router by the router's name."""
    return {
        router.path: [
            f"{router.path}.{name}"
            for name, weight in router.module.named_parameters(recurse=False)
            if len(getattr(weight, "ds_shape", weight.shape)) == 2
        ]
        for router in find_routers(language_model)
        if not expert_weights(router.module)  # else it is a layer with its experts
    }


@cache
def keep_adapters_names() -> None:
    """Keep peft from renaming the targets and the weights of a reward model's adapters.

    It renames them as it would those of transformers 4: `up_proj` becomes the experts instead of the shared ones, and
    weights whose new names fit nothing stay random, in silence. The names of a reward model are those in memory.
    """
    conversion: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    rename_targets = conversion.convert_peft_config_for_transformers
    rename_weights = conversion.convert_peft_adapter_state_dict_for_transformers
    relies_on(rename_targets, "peft_config", "model", "conversions")
    relies_on(rename_weights, "model", "adapter_state_dict")

    def targets(peft_config: Any, model: Any, conversions: Any) -> None:
        if not isinstance(model, RewardModel):
            rename_targets(peft_config, model, conversions)

    def weights(model: Any, peft_config: Any, adapter_state_dict: Any, **options: Any) -> Any:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if isinstance(base, RewardModel):
            return adapter_state_dict
        return rename_weights(model, peft_config, adapter_state_dict, **options)

    conversion.convert_peft_config_for_transformers = targets
    conversion.convert_peft_adapter_state_dict_for_transformers = weights


relies_on(HfQuantizer.get_modules_to_not_convert, "model", "skip_modules", "keep_in_fp32_modules")
relies_on(PreTrainedModel, "_keep_in_fp32_modules")
relies_on(should_convert_module, "full_name", "patterns")

# All modules outside the language model. transformers matches the pattern with the start of a module's name, so a list
# of towers would have to name each family's in full.
NOT_QUANTIZED = rf"(?!model\.(?:{'|'.join(LANGUAGE_MODELS)})\.).*"


def quantization_config(arguments: ModelArguments, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return QLoRA's 4-bit configuration of a language model that computes in `dtype`; None without QLoRA."""
    if not arguments.load_in_4bit:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(missing("load_in_4bit", "bitsandbytes", "qlora"))
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[NOT_QUANTIZED],
    )


def keep_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights when a CPU scores with them: no gradient passes packed ones."""
    for layer in model.modules():
        if type(layer).__name__ == "Linear4bit":
            relies_on(type(layer), attributes=("support_avx512bf16_for_cpu",))
            setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010 - no attribute of every module


def layers_to_quantize(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers that transformers will hold in 4 bits; the model may be on the meta device."""
    skipped = HfQuantizer.get_modules_to_not_convert(model, [NOT_QUANTIZED], list(model._keep_in_fp32_modules or ()))
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, skipped)
    ]
