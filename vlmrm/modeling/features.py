"""Split a vision tower's output by image, and assemble it again in another order.

Families hold the features of a batch of images in different forms: a tensor for each image or tile, one tensor for
all of them, further ones for deepstack layers. Each image's features keep the form of their family: its backbone gets
them as often as the images are shown, and in that order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput

from vlmrm.errors import ConfigError


@dataclass
class EncoderOutput(ModelOutput):
    """Features as a backbone takes them in `mm_encoder_outputs`; a field for each that a family reads."""

    pooler_output: Any = None
    deepstack_features: Any = None
    last_hidden_state: Any = None
    visual_indicator_features: Any = None
    router_logits: Any = None


@dataclass(frozen=True)
class LayerForm:
    """How a family holds the features of one layer.

    `one_tensor` for all images, or one each; `shape` of a tensor without its first dimension; `index` of the language
    model's layer beside which they stand.
    """

    one_tensor: bool
    shape: Sequence[int]
    index: int | None

    def assemble(self, images: Sequence[torch.Tensor]) -> Any:
        pieces = [image.reshape(-1, *self.shape) for image in images]
        value = torch.cat(pieces) if self.one_tensor else tuple(pieces)
        return value if self.index is None else (self.index, value)


@dataclass(frozen=True)
class FeatureForm:
    """How a family holds features: the field of the merger's, the layers, and whether some are deepstack layers.

    Where there is no such field, all are (Granite Vision 4).

    `constants` are what else is in an output, for no image in particular.
    """

    merged: str | None
    layers: Sequence[LayerForm]
    deepstack: bool
    constants: Mapping[str, torch.Tensor | None] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps([self.merged, [asdict(layer) for layer in self.layers], self.deepstack])

    @classmethod
    def from_json(cls, text: str) -> FeatureForm:
        merged, layers, deepstack = json.loads(text)
        return cls(merged, [LayerForm(**layer) for layer in layers], deepstack)


@dataclass(frozen=True)
class Features:
    """Features of one image: those of the merger [tokens, H], then those of each deepstack layer."""

    layers: Sequence[torch.Tensor]
    form: FeatureForm


def split(output: ModelOutput, tokens: Sequence[int], merged: str | None, constants: Sequence[str]) -> list[Features]:
    """Split a tower's output into the features of each image; image i has `tokens[i]` placeholders."""
    deepstack = output.get("deepstack_features")
    values = [*([output[merged]] if merged else ()), *(deepstack or ())]
    form = FeatureForm(
        merged,
        [_form(value) for value in values],
        deepstack is not None,
        {name: output.get(name) for name in constants},
    )
    layers = []
    for value in values:
        rows = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in _tensors(value)])
        if len(rows) != sum(tokens):
            raise ConfigError(
                f"the vision tower has {len(rows)} features for the {sum(tokens)} placeholders of a batch: where "
                "videos of different numbers of frames cannot be in one batch, write per_device_train_batch_size: 1."
            )
        layers.append(rows.split(list(tokens)))
    return [Features(image, form) for image in zip(*layers, strict=True)]


def assemble(images: Sequence[Features]) -> EncoderOutput:
    """Return the output for images in the order shown."""
    form = images[0].form
    layers = [
        layer.assemble(pieces)
        for layer, pieces in zip(form.layers, zip(*(image.layers for image in images), strict=True), strict=True)
    ]
    merged = {form.merged: layers.pop(0)} if form.merged else {}
    return EncoderOutput(**merged, **form.constants, deepstack_features=layers if form.deepstack else None)


def _form(value: Any) -> LayerForm:
    return LayerForm(
        isinstance(value, torch.Tensor) or (_is_named(value) and isinstance(value[1], torch.Tensor)),
        tuple(_tensors(value)[0].shape[1:]),
        value[0] if _is_named(value) else None,
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    value = value[1] if _is_named(value) else value
    return [value] if isinstance(value, torch.Tensor) else value


def _is_named(value: Any) -> bool:
    """Return whether these are the index of a layer and its features (Granite Vision 4)."""
    return isinstance(value, tuple) and isinstance(value[0], int)
