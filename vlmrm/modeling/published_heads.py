"""A published head as one of ours: `score_hidden` and `score`, in float32, with one output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling.head import Head
from vlmrm.modeling.published_layouts import PublishedLayout

# The weight and the bias of each linear layer, in order.
Layers = list[tuple[torch.Tensor, torch.Tensor | None]]


def chosen_output(layout: PublishedLayout, output_name: str | None) -> str:
    """Return the name of the output to import."""
    names = list(layout.outputs)
    if output_name is None and len(names) == 1:
        return names[0]
    if output_name not in names:
        fault = "several outputs" if output_name is None else f"no output {output_name!r}"
        raise ConfigError(f"{layout.name} has {fault}: import one by --output-name {', '.join(names)}.")
    return output_name


def convert_head(
    layout: PublishedLayout, output_name: str, names: Iterable[str], read: Callable[[str], Any], width: int
) -> tuple[Head, dict[str, torch.Tensor]]:
    """Return a published head over hidden states of `width` channels, and its weights by our names, float32.

    Of several outputs at one token the first is taken, or that of the token where there are as many as tokens.
    """
    layers = _layers(layout, output_name, names, read)
    last, bias = layers.pop()
    if len(last) not in layout.rows:
        raise CheckpointError(f"the head gives {len(last)} numbers, and that of {layout.name} gives {layout.rows[0]}.")
    row = list(layout.outputs).index(output_name) if len(last) == len(layout.tokens) else 0
    last, bias = last[row : row + 1], None if bias is None else bias[row : row + 1]
    if layers and layout.activation is None:
        raise CheckpointError(f"the head has {len(layers) + 1} layers, and {layout.name} has one: name its --layout.")
    head = Head([len(weight) for weight, _ in layers], layout.activation or "silu", bias is not None)
    weights = {"score.weight": last} | ({} if bias is None else {"score.bias": bias})
    for index, (weight, hidden_bias) in enumerate(layers):
        weights[f"score_hidden.{2 * index}.weight"] = weight
        weights[f"score_hidden.{2 * index}.bias"] = torch.zeros(len(weight)) if hidden_bias is None else hidden_bias
    widths = [width, *head.hidden, 1]
    for (weight, _), (before, after) in zip([*layers, (last, bias)], pairwise(widths), strict=True):
        if weight.shape != (after, before):
            raise CheckpointError(
                f"a layer of the head is {list(weight.shape)} and should be {[after, before]}: the file is broken, or "
                "--base another model."
            )
    return head, {name: weight.float().contiguous() for name, weight in weights.items()}


def _layers(layout: PublishedLayout, output_name: str, names: Iterable[str], read: Callable[[str], Any]) -> Layers:
    wanted = layout.outputs[output_name].head
    layers: dict[Any, dict[str, torch.Tensor]] = {}
    for name in names:
        if match := layout.matches(name):
            groups: Mapping[str, str | None] = match.groupdict()
            if groups.get("head") == wanted:
                layer = groups.get("layer") or ""
                layers.setdefault(int(layer) if layer.isdigit() else layer, {})[groups["kind"] or ""] = read(name)
    if not layers:
        raise CheckpointError(f"the head of the output {output_name} is missing: copy the checkpoint again.")
    if missing := [layer for layer in layout.layers if layer not in map(str, layers)]:
        raise CheckpointError(f"layer {missing[0]} of the head is missing: copy the checkpoint again.")
    for layer, tensors in layers.items():
        weight = tensors.get("weight")
        complete = (
            weight is not None and weight.ndim == 2 and all(len(tensor) == len(weight) for tensor in tensors.values())
        )
        if not complete or layout.bias not in (None, "bias" in tensors):
            raise CheckpointError(f"layer {layer or 0} of the head is incomplete: copy the checkpoint again.")
    return [(layers[layer]["weight"], layers[layer].get("bias")) for layer in sorted(layers)]
