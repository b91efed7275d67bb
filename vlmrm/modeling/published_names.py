"""Translate the names that trainers store a backbone's weights under into those of our models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightRenaming

from vlmrm.errors import CheckpointError
from vlmrm.libraries import relies_on
from vlmrm.modeling.published_layouts import PublishedLayout
from vlmrm.modeling.published_source import Reader, with_lora
from vlmrm.modeling.reward_model import RewardModel

relies_on(conversion_mapping.get_model_conversion_mapping, "model")
relies_on(
    core_model_loading.rename_source_key,
    *("weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"),
)

# Of a language head, for which there is no use, and constants that older versions stored.
NOT_READ = re.compile(r"(^|\.)lm_head\.|\.rotary_emb\.inv_freq$")


class Naming:
    """Map stored names of a backbone's weights to names in a `model`; the model may have no weights yet.

    Weights that transformers converts further on loading (the experts of a mixture) keep their stored names.
    """

    def __init__(self, model: RewardModel, layout: PublishedLayout, source: str | Path):
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        self.renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self.converters: Any = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
        self.prefix = model.base_model_prefix
        self.expected = model.state_dict()
        self.backbone = {name for name in self.expected if name.startswith("model.")}
        self.architecture = type(model).__name__
        self.layout = layout
        self.source = source

    def of(self, stored: str) -> tuple[str, str] | None:
        """Return the name in memory and that in the new file; None for a weight of a reward or language head."""
        if self.layout.matches(stored) or NOT_READ.search(stored):
            return None
        name = stored
        for pattern, replacement in self.layout.renamed.items():
            name = re.sub(pattern, replacement, name)
        loaded, converter = core_model_loading.rename_source_key(
            name, self.renamings, self.converters, self.prefix, self.expected
        )
        if NOT_READ.search(loaded):
            return None
        return loaded, name if converter else loaded

    def renamed(self, weights: Mapping[str, Reader]) -> dict[str, Reader]:
        """Return weights of the backbone by their names in the new file."""
        named: dict[str, Reader] = {}
        for stored, read in weights.items():
            if (names := self.of(stored)) is None:
                continue
            loaded, name = names
            if loaded not in self.backbone:
                raise CheckpointError(
                    f"{self.source} has {stored}, which a {self.architecture} has not: it is broken, or of another "
                    "architecture."
                )
            if name in named:
                raise CheckpointError(f"{self.source} has {name} twice: leave one file of weights in the folder.")
            named[name] = self._checked(name, read)
        return named

    def backbone_weights(self, weights: Mapping[str, Reader]) -> dict[str, Reader]:
        """Do `renamed` with all weights of the backbone."""
        names = [*filter(None, map(self.of, weights))]
        missing = self.backbone - {loaded for loaded, _ in names}
        # One stored weight may become several in memory, and then loading it says what is missing.
        if missing and all(loaded == name for loaded, name in names):
            raise CheckpointError(
                f"{self.source} lacks {', '.join(sorted(missing)[:3])}, {len(missing)} weights in all: it is broken, "
                f"or of another architecture than {self.architecture}."
            )
        return self.renamed(weights)

    def merged(
        self,
        named: Mapping[str, Reader],
        lora: Mapping[str, Mapping[str, Reader]],
        scale: float | None,
    ) -> dict[str, Reader]:
        """Return those of the `named` weights that have LoRA weights, with these merged."""
        if lora and scale is None:
            raise CheckpointError(
                f"{self.source} has LoRA weights of {min(lora)} and nothing that says their scale: merge them with "
                "peft."
            )
        merged: dict[str, Reader] = {}
        for module, parts in lora.items():
            names = self.of(f"{module}.weight")
            if names is None:
                continue  # of a language head, for which there is no use
            if names[1] not in named:
                raise CheckpointError(
                    f"{self.source} has LoRA weights of {module}, which its base has not: name the model that it was "
                    "trained on by --base."
                )
            merged[names[1]] = with_lora(names[1], named[names[1]], parts, scale or 0.0)
        return merged

    def _checked(self, name: str, read: Reader) -> Reader:
        def checked() -> torch.Tensor:
            tensor = read()
            if name in self.expected and tensor.shape != self.expected[name].shape:
                raise CheckpointError(
                    f"{name} is {list(tensor.shape)}, and by the configuration {list(self.expected[name].shape)}: "
                    "name the model that it was trained from by --base."
                )
            return tensor

        return checked
