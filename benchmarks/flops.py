"""Multiplications and additions of a batch, from its shapes: the ratio of two ways that work could give.

Counted, each multiplication with its addition as 2: the linear layers of every token, attention's two products over
the keys that a kernel visits, the vision tower with its merger, and the language-model head where there is one.

- A kernel without a mask visits the half of the square below the diagonal; one with a mask visits all of its keys. So
  padded rows with windows or images that see both ways cost the whole square in every layer. Shared rows cost the
  blocks that `MaskRule` makes of the row: up to 256 queries with the keys from the first to the last that any sees.
- A gated delta net is counted as torch's own code computes it, in chunks of C tokens: for each chunk and head the
  products within it (C x C), two triangular solves, and three products with the state. Padding to whole chunks counts,
  and so does that of segments which one call computes together.

Norms, activations, rotary embeddings, decays and the scalar head are left out; they are less than a hundredth, but
for decays, which cost both ways alike a chunk. `attention=False` leaves attention's products out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from vlmrm.batching.shared import PackedLayout
from vlmrm.modeling.kernels import plain_spans
from vlmrm.modeling.masks import MaskedSpan, MaskRule
from vlmrm.modeling.state import StateTree, _chunk
from vlmrm.rendering import Rendered

CHUNK = 64  # of a padded row's delta nets


@dataclass(frozen=True)
class Work:
    """Operations of one forward pass, and the tokens of text and images that the language model computes."""

    body: float
    language_head: float
    tokens: int

    @property
    def forward(self) -> float:
        return self.body + self.language_head

    @property
    def training(self) -> float:
        """Forward and backward; the unused logits of a language-model head get no gradient."""
        return 3 * self.body + self.language_head


def of_padded(config: PreTrainedConfig, conversations: Sequence[Rendered], attention: bool = True) -> Work:
    """Count one padded row per conversation, each with its own images, and logits for every token."""
    text: Any = config.get_text_config()
    lengths = [len(item) for item in conversations]
    rows, width = len(lengths), max(lengths)
    # Padding needs a mask, and with one the kernel visits the whole square; without, only half of it.
    masked = min(lengths) < width or config.model_type == "gemma3"
    visited = dict.fromkeys(_kinds(config), rows * width * width / (1 if masked else 2) * attention)
    media = [grid for item in conversations for medium in item.media for grid in _grids(config, medium.tensors)]
    return Work(
        _text(config, rows * width, visited, [(rows, width, CHUNK)], last=rows * width)
        + sum(vision(config, grid, attention) for grid in media),
        2 * rows * width * text.hidden_size * text.vocab_size,
        rows * width,
    )


def of_shared(config: PreTrainedConfig, inputs: dict[str, Any], attention: bool = True) -> Work:
    """Count one packed row, from the inputs of a `SharedBatcher`."""
    layout: PackedLayout = inputs["layout"]
    visited = {kind: _visited(spans) * attention for kind, spans in _spans(config, inputs).items()}
    levels = StateTree.of(layout, torch.device("cpu")).levels
    calls = [(level.count, level.length, _chunk(level, CHUNK)) for level in levels]
    tokens = inputs["input_ids"].shape[1]
    media = inputs["media"].get("image")
    vision_work = sum(vision(config, grid, attention) for grid in _grids(config, media["tensors"])) if media else 0
    return Work(_text(config, tokens, visited, calls, last=len(layout.last_tokens)) + vision_work, 0, tokens)


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer."""
    text: Any = config.get_text_config()
    return getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers


def _spans(config: PreTrainedConfig, inputs: dict[str, Any]) -> Mapping[str, Sequence[MaskedSpan]]:
    """Return the calls of the kernel in a layer of each kind."""
    layout, device = inputs["layout"], torch.device("cpu")
    rules: dict[str, MaskRule | None] = dict.fromkeys(_kinds(config))
    if config.model_type == "gemma3":
        rules = create_masks_for_vision_model(
            config=config.get_text_config(),
            inputs_embeds=torch.empty(1, len(layout), 0),
            attention_mask=inputs["attention_mask"].cpu(),
            past_key_values=None,
            position_ids=inputs["position_ids"].cpu(),
            block_sequence_ids=get_block_sequence_ids_for_mask(inputs["token_type_ids"].cpu()),
        )
    return {
        kind: plain_spans(layout, device) if rule is None else rule.spans(layout, device)
        for kind, rule in rules.items()
    }


def _visited(spans: Sequence[MaskedSpan]) -> float:
    """Return the pairs of a query and a key that the kernel computes."""
    pairs = 0.0
    for span in spans:
        keys = sum(stop - start for start, stop in span.keys)
        pairs += (span.stop - span.start) * keys / (2 if span.mask is None else 1)
    return pairs


def _text(
    config: PreTrainedConfig,
    tokens: int,
    visited: Mapping[str, float],
    calls: Sequence[tuple[int, int, int]],
    last: int,
) -> float:
    """Count the layers of the language model; in the last layer, the feed-forward part for `last` tokens only.

    `visited` are the pairs of query and key in a layer of each kind, `calls` the rows, their length and the chunk of
    each call of a delta net.
    """
    text: Any = config.get_text_config()
    hidden = text.hidden_size
    head = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    query, key = text.num_attention_heads * head, text.num_key_value_heads * head
    gated = query if config.model_type == "qwen3_5" else 0
    projections = 2 * hidden * (2 * query + gated + 2 * key)
    forward = 2 * 3 * hidden * text.intermediate_size
    total = 0.0
    for kind in _kinds(config):
        if kind == "linear_attention":
            total += tokens * (_delta_projections(text) + forward) + sum(delta_rule(text, *call) for call in calls)
        else:
            total += tokens * (projections + forward) + visited[kind] * 4 * query
    return total - (tokens - last) * forward


def _delta_projections(text: Any) -> int:
    """Count what a delta net computes for a token around its recurrence: projections and the convolution."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    linear = text.hidden_size * (2 * keys + 3 * values + 2 * text.linear_num_value_heads)
    return 2 * linear + 2 * text.linear_conv_kernel_dim * (2 * keys + values)


def delta_rule(text: Any, rows: int, length: int, chunk: int, solves: bool = True) -> float:
    """Count the gated delta rule over rows of a length; `solves=False` leaves out its triangular solves."""
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    within = chunk * chunk * (4 * key + 2 * value + (key + value) * solves)
    with_state = 6 * chunk * key * value
    return rows * -(-length // chunk) * text.linear_num_value_heads * (within + with_state)


def vision(config: PreTrainedConfig, grid: Sequence[int], attention: bool = True) -> float:
    """Count the vision tower and merger for an image of `grid` (time, height, width) in patches."""
    tower: Any = config.vision_config
    patches, width = grid[0] * grid[1] * grid[2], tower.hidden_size
    frames, keys, matrices = getattr(tower, "temporal_patch_size", 1), float(patches), 2
    depth = getattr(tower, "depth", None) or tower.num_hidden_layers
    if config.model_type == "gemma3":
        merger = config.mm_tokens_per_image * 2 * width * config.get_text_config().hidden_size
    else:
        merged = tower.spatial_merge_size**2
        merger = patches / merged * 2 * (merged * width * merged * width + merged * width * tower.out_hidden_size)
    if config.model_type == "qwen2_5_vl":
        matrices, full_layers = 3, len(tower.fullatt_block_indexes)
        window = (tower.window_size // tower.patch_size) ** 2
        keys = (full_layers * patches + (depth - full_layers) * min(patches, window)) / depth
    embedding = 2 * 3 * frames * tower.patch_size**2 * width
    linear = 2 * (4 * width * width + matrices * width * tower.intermediate_size)
    return patches * (embedding + depth * (linear + 4 * width * keys * attention)) + merger


def _grids(config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Return the grid in patches of each image."""
    if "image_grid_thw" in tensors:
        return tensors["image_grid_thw"].tolist()
    tower: Any = config.vision_config
    side = tower.image_size // tower.patch_size
    return [[1, side, side]] * len(tensors["pixel_values"])
