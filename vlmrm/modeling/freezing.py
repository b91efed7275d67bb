"""Training some parts of the model and not others: the vision tower, the merger, the language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vlmrm.errors import ConfigError

# Where the architectures keep their parts. The Qwen family's mergers are inside its tower.
TOWERS = ("visual", "vision_tower", "vision_model")
MERGERS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector")
LANGUAGE_MODELS = ("language_model", "text_model")


def freeze(model: nn.Module, vit: bool = False, merger: bool | None = None, llm: bool = False) -> None:
    """Take the named parts of a reward model out of training; the head always trains.

    The merger goes with the vision tower, `merger=None`, unless `merger` says otherwise. A frozen tower runs without
    gradients and keeps no activations, with gradient checkpointing or without, whether or not its merger trains. Call
    it before adapters are added.

    Raises:
        ConfigError: when the architecture has no such part under a name known here.
    """
    backbone = model.get_submodule("model")
    mergers = _find(backbone, MERGERS)
    if vit:
        for part in _wanted(backbone, "vit", TOWERS):
            for piece in _pieces_without(part, mergers):
                piece.requires_grad_(False)
                piece.register_forward_pre_hook(_grad_off)
                piece.register_forward_hook(_grad_back, always_call=True)
        if merger is None and not mergers:
            raise ConfigError(
                f"freeze_vit: {type(backbone).__name__} has no merger {' or '.join(MERGERS)}, only "
                f"{_parts(backbone)}: write freeze_merger: false to freeze the vision tower alone."
            )
    if merger or (vit and merger is None):
        for part in _wanted(backbone, "merger", MERGERS):
            part.requires_grad_(False)
    if llm:
        for part in _wanted(backbone, "llm", LANGUAGE_MODELS):
            part.requires_grad_(False)


def _pieces_without(module: nn.Module, mergers: list[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules inside `module` that run as one and contain no merger."""
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


def language_model_path(model: nn.Module) -> str:
    """The name of the language model inside a reward model: `model.language_model`, say.

    Raises:
        ConfigError: when it has none under a name known here.
    """
    backbone = model.get_submodule("model")
    for path in LANGUAGE_MODELS:
        if _find(backbone, [path]):
            return f"model.{path}"
    raise ConfigError(
        f"{type(backbone).__name__} has no language model under a known name (its parts are {_parts(backbone)})."
    )


def _wanted(backbone: nn.Module, name: str, paths: tuple[str, ...]) -> list[nn.Module]:
    found = _find(backbone, paths)
    if not found:
        raise ConfigError(
            f"freeze_{name}: {type(backbone).__name__} has no part {' or '.join(paths)}, only {_parts(backbone)}: "
            f"remove freeze_{name}."
        )
    return found


def _find(backbone: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    modules = dict(backbone.named_modules())
    return [modules[path] for path in paths if path in modules]


def _parts(backbone: nn.Module) -> str:
    return ", ".join(name for name, _ in backbone.named_children())
