"""What a vision tower answers, taken apart by image and put together again in another order.

Families hold the features of a batch of images in different forms: a tensor for each image or tile, one tensor for
all of them, further ones for deepstack layers. A `FeatureForm` is that of one family; it gives its backbone the
features of images as often, and in the order, that they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput

# Features of one image: those of the merger [tokens, H], then those of each deepstack layer.
Features = list[torch.Tensor]


@dataclass
class EncoderOutput(ModelOutput):
    """Features in the form that a family's backbone takes as one of its `mm_encoder_outputs`; a field of each family
    that has another."""

    pooler_output: Any = None
    deepstack_features: Any = None
    last_hidden_state: Any = None
    visual_indicator_features: Any = None


@dataclass(frozen=True)
class _Layer:
    """The features of one layer: whether the family has a tensor for all images, the last dimensions, and the index of
    the language model's layer that they are named by, if they are."""

    one_tensor: bool
    shape: tuple[int, ...]
    index: int | None

    def assemble(self, images: Sequence[torch.Tensor]) -> Any:
        pieces = [image.reshape(-1, *self.shape) for image in images]
        value = torch.cat(pieces) if self.one_tensor else tuple(pieces)
        return value if self.index is None else (self.index, value)


@dataclass(frozen=True)
class FeatureForm:
    """The form of a family's output: `field` has the features that take the placeholders' places, `constants` are what
    is in it for no image in particular."""

    field: str
    layers: Sequence[_Layer]
    deepstack: bool
    constants: dict[str, torch.Tensor]

    @classmethod
    def of(cls, output: ModelOutput, field: str, constants: Sequence[str]) -> FeatureForm:
        """Return the form of a tower's output."""
        deepstack = output.get("deepstack_features")
        layers = [_layer(value) for value in _values(output, field)]
        return cls(field, layers, deepstack is not None, {name: output[name] for name in constants})

    def split(self, output: ModelOutput, tokens: Sequence[int]) -> list[Features]:
        """Return the features of each image, of which image i has `tokens[i]` placeholders.

        Raises:
            ValueError: when the tower has more features than that, or fewer.
        """
        layers = []
        for value in _values(output, self.field):
            rows = _rows(value)
            if len(rows) != sum(tokens):
                raise ValueError(f"its vision tower has {len(rows)} features for {sum(tokens)} placeholders")
            layers.append(rows.split(list(tokens)))
        return [list(image) for image in zip(*layers, strict=True)]

    def assemble(self, images: Sequence[Features]) -> EncoderOutput:
        """Return the output for images in the order shown."""
        merged, *deepstack = (
            layer.assemble(features) for layer, features in zip(self.layers, zip(*images, strict=True), strict=True)
        )
        deepstack_features = deepstack if self.deepstack else None
        return EncoderOutput(**{self.field: merged}, **self.constants, deepstack_features=deepstack_features)


def _values(output: ModelOutput, field: str) -> list[Any]:
    return [output[field], *(output.get("deepstack_features") or ())]


def _layer(value: Any) -> _Layer:
    named = isinstance(value, tuple) and isinstance(value[0], int)
    index, value = value if named else (None, value)
    tensor = value if isinstance(value, torch.Tensor) else value[0]
    return _Layer(isinstance(value, torch.Tensor), tuple(tensor.shape[1:]), index)


def _rows(value: Any) -> torch.Tensor:
    """Return the features of all images, one after the other, [tokens, H]."""
    if isinstance(value, tuple) and isinstance(value[0], int):
        value = value[1]
    pieces = [value] if isinstance(value, torch.Tensor) else value
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
