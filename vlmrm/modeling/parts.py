"""Name the parts of a reward model: vision tower, merger, head; everything else is the language model.

Learning rates, adapters, freezing and 4-bit weights all go by these parts, as `vlmrm.modeling.families` declares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vlmrm.errors import ConfigError
from vlmrm.modeling.families import Family, existing_parts

VISION, MERGER, HEAD, LANGUAGE = PARTS = ("vision", "merger", "head", "language")
IN_WORDS = {VISION: "vision tower", MERGER: "merger", HEAD: "head", LANGUAGE: "language model"}
HEAD_MODULES = ("score", "score_hidden")


def family_in(model: nn.Module) -> Family:
    """Return the family of a reward model, and for other modules the usual one."""
    return getattr(model, "family", None) or Family("")


def part_of(model: nn.Module, name: str) -> str:
    """Return the part of a reward model that holds a module or a weight of this name; adapters are in what they adapt.

    Marks between images and rows, weights of the backbone itself, are as wide as the merger's features, and its.
    """
    if _is_under(name, HEAD_MODULES):
        return HEAD
    family, path = family_in(model), name.removeprefix("model.")
    if _is_under(path, family.mergers) or path in marks(model):
        return MERGER
    return VISION if _is_under(path, family.towers) else LANGUAGE


def marks(model: nn.Module) -> list[str]:
    """Return the names of the backbone's own weights: they stand between images or their rows."""
    return [name for name, _ in model.get_submodule("model").named_parameters(recurse=False)]


def trained_by_part(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trained weights of each part of a reward model."""
    parts: dict[str, list[nn.Parameter]] = {part: [] for part in PARTS}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            parts[part_of(model, name)].append(weight)
    return parts


def linear_layers(model: nn.Module, part: str) -> Iterator[str]:
    """Yield the names of the linear layers of a part.

    Not the output of torch's own attention, whose weights it takes past the layer: an adapter would see nothing.
    """
    passed_over = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in passed_over and part_of(model, name) == part:
            yield name


def has_merger(model: nn.Module) -> bool:
    """Return whether the family's merger is known, and in this model."""
    return bool(existing_parts(model.get_submodule("model"), family_in(model).mergers))


def language_model_path(model: nn.Module) -> str:
    """Return the path of the language model inside a reward model, such as `model.language_model`."""
    backbone = model.get_submodule("model")
    for path in family_in(model).language_models:
        if existing_parts(backbone, [path]):
            return f"model.{path}"
    raise ConfigError(
        f"{type(backbone).__name__} has no language model under a known name (its parts are {part_names(backbone)})."
    )


def part_names(backbone: nn.Module) -> str:
    """Return the names of a backbone's own modules, for the sentence that a part is not among them."""
    return ", ".join(name for name, _ in backbone.named_children())


def _is_under(path: str, prefixes: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{prefix}.") for prefix in prefixes)


# Freezing ------------------------------------------------------------------------------------------------------------


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
