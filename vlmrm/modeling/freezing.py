"""Training some parts of the model and not others: the vision tower, the merger, the language model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from vlmrm.errors import ConfigError

# Where the architectures keep their parts. The Qwen family's merger is inside its tower; so the longer path wins.
TOWERS = ("visual", "vision_tower", "vision_model")
MERGERS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector")
LANGUAGE_MODELS = ("language_model", "text_model")


def freeze(model: nn.Module, vit: bool = False, merger: bool = False, llm: bool = False) -> None:
    """Takes the named parts of a reward model out of training; the head always trains.

    A frozen vision tower stores no activations: nothing in it asks for a gradient, its pixels included. Call it
    before adapters are added.

    Raises:
        ConfigError: when the architecture has no such part under a name known here.
    """
    backbone = model.get_submodule("model")
    parts = {
        "vit": (vit, TOWERS),
        "merger": (merger, MERGERS),
        "llm": (llm, LANGUAGE_MODELS),
    }
    mergers = {id(parameter) for part in _find(backbone, MERGERS) for parameter in part.parameters()}
    for name, (wanted, paths) in parts.items():
        if not wanted:
            continue
        found = _find(backbone, paths)
        if not found:
            raise ConfigError(
                f"freeze_{name}: {type(backbone).__name__} has no part {' or '.join(paths)}, only "
                f"{_parts(backbone)}: remove freeze_{name}."
            )
        for part in found:
            for parameter in part.parameters():
                if name != "vit" or id(parameter) not in mergers:
                    parameter.requires_grad_(False)


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


def _find(backbone: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    modules = dict(backbone.named_modules())
    return [modules[path] for path in paths if path in modules]


def _parts(backbone: nn.Module) -> str:
    return ", ".join(name for name, _ in backbone.named_children())
