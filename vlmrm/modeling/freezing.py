"""Choose which weights are trained: freezing of the vision tower, merger and language model, LoRA and QLoRA."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vlmrm.errors import ConfigError
from vlmrm.libraries import missing, relies_on
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.experts import expert_weights, find_routers
from vlmrm.modeling.families import LANGUAGE_MODELS, Family, existing_parts
from vlmrm.modeling.reward_model import RewardModel

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger("vlmrm")

HEAD_MODULES = ("score", "score_hidden")
# All modules outside the language model. transformers matches the pattern with the start of a module's name, so a list
# of towers would have to name each family's in full.
NOT_QUANTIZED = rf"(?!model\.(?:{'|'.join(LANGUAGE_MODELS)})\.).*"


def freeze(model: nn.Module, vit: bool = False, merger: bool | None = None, llm: bool = False) -> None:
    """Freeze parts of a reward model; the head always trains.

    With `merger=None` the merger is frozen with the vision tower. A frozen tower runs without gradients and keeps no
    activations, with gradient checkpointing or without, whether or not its merger trains. Call it before adapters are
    added.

    Raises:
        ConfigError: when the architecture has no such part under a known name.
    """
    backbone, family = model.get_submodule("model"), _family_of(model)
    mergers = existing_parts(backbone, family.mergers)
    if vit:
        towers = _parts_to_freeze(backbone, "vit", family.towers)
        trained = {weight for part in mergers for weight in part.parameters()}
        for weight in {weight for part in towers for weight in part.parameters()} - trained:
            weight.requires_grad_(False)
        for piece in (piece for part in towers for piece in _pieces_without(part, mergers)):
            # Frozen weights alone are not enough: inputs that require gradients, as gradient checkpointing makes
            # them, would still keep the activations.
            piece.register_forward_pre_hook(_grad_off)
            piece.register_forward_hook(_grad_back, always_call=True)
        if merger is None and family.mergers and not mergers:
            raise ConfigError(
                f"freeze_vit: {type(backbone).__name__} has no merger {' or '.join(family.mergers)}, only "
                f"{_part_names(backbone)}: write freeze_merger: false to freeze the vision tower alone."
            )
    if merger or (vit and merger is None and family.mergers):
        for part in _parts_to_freeze(backbone, "merger", family.mergers):
            part.requires_grad_(False)
        for weight in backbone.parameters(recurse=False):  # marks between images and rows, as wide as their features
            weight.requires_grad_(False)
    if llm:
        for part in _parts_to_freeze(backbone, "llm", family.language_models):
            part.requires_grad_(False)


def _family_of(model: nn.Module) -> Family:
    """Return the family of a reward model, and for other modules the usual one."""
    return getattr(model, "family", None) or Family("")


def _pieces_without(module: nn.Module, mergers: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules inside `module` that are called as one and contain no merger."""
    if module in mergers:
        return
    if isinstance(module, nn.ModuleList) or any(inner in mergers for inner in module.modules()):
        for child in module.children():
            yield from _pieces_without(child, mergers)
    else:
        yield module


def _grad_off(module: Any, args: tuple) -> None:
    module.grad_was_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(False)


def _grad_back(module: Any, args: tuple, output: object) -> None:
    torch.set_grad_enabled(module.grad_was_enabled)


def lora_config(arguments: ModelArguments, model: RewardModel) -> LoraConfig:
    """Return LoRA's configuration: layers of the language model, all linear ones or those named, and the whole head.

    Routers are adapted where `lora_target_modules` names them, experts with `lora_experts`; the log says what is left.

    Raises:
        ConfigError: when a name is of no linear layer or router of the language model, or it has no experts to adapt.
    """
    from peft import LoraConfig, TaskType

    path = language_model_path(model)
    language_model = model.get_submodule(path)
    routers = _router_weights(language_model)
    linear = {name for name, module in language_model.named_modules() if isinstance(module, nn.Linear)}
    in_routers = {name for name in linear if any(f"{name}.".startswith(f"{router}.") for router in routers)}
    layers = {_last(name) for name in linear - in_routers}
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
    keep_adapters_names()
    return LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        # A pattern: a list of names would also match layers of the vision tower.
        target_modules=rf"{re.escape(path)}\..*\.({'|'.join(sorted(named & layers))})",
        exclude_modules=[f"{path}.{name}" for name in sorted(in_routers) if _last(name) in named & layers] or None,
        target_parameters=[f"{path}.{name}" for name in parameters] or None,
        modules_to_save=[name for name in HEAD_MODULES if hasattr(model, name)],
    )


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


def quantization_config(arguments: ModelArguments) -> Any:
    """Return QLoRA's 4-bit configuration for the language model, or None without `load_in_4bit`.

    Raises:
        ConfigError: when this machine cannot hold weights in 4 bits.
    """
    if not arguments.load_in_4bit:
        return None
    if not torch.cuda.is_available():
        raise ConfigError("load_in_4bit needs a CUDA GPU, and there is none: remove it.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(missing("load_in_4bit", "bitsandbytes", "qlora"))
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=[NOT_QUANTIZED],
    )


def language_model_path(model: nn.Module) -> str:
    """Return the path of the language model inside a reward model, such as `model.language_model`.

    Raises:
        ConfigError: when it has none under a known name.
    """
    backbone = model.get_submodule("model")
    for path in _family_of(model).language_models:
        if existing_parts(backbone, [path]):
            return f"model.{path}"
    raise ConfigError(
        f"{type(backbone).__name__} has no language model under a known name (its parts are {_part_names(backbone)})."
    )


def _parts_to_freeze(backbone: nn.Module, name: str, paths: Sequence[str]) -> list[nn.Module]:
    parts = existing_parts(backbone, paths)
    if not parts:
        raise ConfigError(
            f"freeze_{name}: {type(backbone).__name__} has no part {' or '.join(paths)}, only "
            f"{_part_names(backbone)}: remove freeze_{name}."
        )
    return parts


def _part_names(backbone: nn.Module) -> str:
    return ", ".join(name for name, _ in backbone.named_children())
