"""Choose which weights are trained: freezing of the vision tower, merger and language model, LoRA and QLoRA."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vlmrm.errors import ConfigError
from vlmrm.libraries import missing
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.families import LANGUAGE_MODELS, MERGERS, TOWERS
from vlmrm.modeling.reward_model import RewardModel

if TYPE_CHECKING:
    from peft import LoraConfig

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
    backbone = model.get_submodule("model")
    mergers = _find(backbone, MERGERS)
    if vit:
        for part in _parts_to_freeze(backbone, "vit", TOWERS):
            for piece in _pieces_without(part, mergers):
                piece.requires_grad_(False)
                # Frozen weights alone are not enough: inputs that require gradients, as gradient checkpointing makes
                # them, would still keep the activations.
                piece.register_forward_pre_hook(_grad_off)
                piece.register_forward_hook(_grad_back, always_call=True)
        if merger is None and not mergers:
            raise ConfigError(
                f"freeze_vit: {type(backbone).__name__} has no merger {' or '.join(MERGERS)}, only "
                f"{_part_names(backbone)}: write freeze_merger: false to freeze the vision tower alone."
            )
    if merger or (vit and merger is None):
        for part in _parts_to_freeze(backbone, "merger", MERGERS):
            part.requires_grad_(False)
    if llm:
        for part in _parts_to_freeze(backbone, "llm", LANGUAGE_MODELS):
            part.requires_grad_(False)


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
    """Return LoRA's configuration: linear layers of the language model, all or those named, and the whole head.

    Raises:
        ConfigError: when a named layer is not a linear layer of the language model.
    """
    from peft import LoraConfig, TaskType

    path = language_model_path(model)
    linear = {
        name.rpartition(".")[2]
        for name, module in model.get_submodule(path).named_modules()
        if isinstance(module, nn.Linear)
    }
    targets = set(arguments.lora_target_modules or linear)
    if not targets <= linear:
        raise ConfigError(
            f"lora_target_modules names {', '.join(sorted(targets - linear))}: the language model has "
            f"{', '.join(sorted(linear))}."
        )
    return LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        # A pattern: a list of names would also match layers of the vision tower.
        target_modules=rf"{re.escape(path)}\..*\.({'|'.join(sorted(targets))})",
        modules_to_save=[name for name in HEAD_MODULES if hasattr(model, name)],
    )


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
    for path in LANGUAGE_MODELS:
        if _find(backbone, [path]):
            return f"model.{path}"
    raise ConfigError(
        f"{type(backbone).__name__} has no language model under a known name (its parts are {_part_names(backbone)})."
    )


def _parts_to_freeze(backbone: nn.Module, name: str, paths: tuple[str, ...]) -> list[nn.Module]:
    parts = _find(backbone, paths)
    if not parts:
        raise ConfigError(
            f"freeze_{name}: {type(backbone).__name__} has no part {' or '.join(paths)}, only "
            f"{_part_names(backbone)}: remove freeze_{name}."
        )
    return parts


def _find(backbone: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    modules = dict(backbone.named_modules())
    return [modules[path] for path in paths if path in modules]


def _part_names(backbone: nn.Module) -> str:
    return ", ".join(name for name, _ in backbone.named_children())
