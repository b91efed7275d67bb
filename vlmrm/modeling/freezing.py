"""Freeze the vision tower, the merger or the language model of a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vlmrm.errors import ConfigError
from vlmrm.modeling.families import existing_parts
from vlmrm.modeling.parts import family_in, part_names


def freeze(model: nn.Module, vit: bool = False, merger: bool | None = None, llm: bool = False) -> None:
    """Freeze parts of a reward model; the head always trains.

    With `merger=None` the merger is frozen with the vision tower. A frozen tower runs without gradients and keeps no
    activations, with gradient checkpointing or without, whether or not its merger trains. Call it before adapters are
    added.
    """
    backbone, family = model.get_submodule("model"), family_in(model)
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
                f"{part_names(backbone)}: write freeze_merger: false to freeze the vision tower alone."
            )
    if merger or (vit and merger is None and family.mergers):
        for part in _parts_to_freeze(backbone, "merger", family.mergers):
            part.requires_grad_(False)
        for weight in backbone.parameters(recurse=False):  # marks between images and rows, as wide as their features
            weight.requires_grad_(False)
    if llm:
        for part in _parts_to_freeze(backbone, "llm", family.language_models):
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


def _parts_to_freeze(backbone: nn.Module, name: str, paths: Sequence[str]) -> list[nn.Module]:
    parts = existing_parts(backbone, paths)
    if not parts:
        raise ConfigError(
            f"freeze_{name}: {type(backbone).__name__} has no part {' or '.join(paths)}, only "
            f"{part_names(backbone)}: remove freeze_{name}."
        )
    return parts
