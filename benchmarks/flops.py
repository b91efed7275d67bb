"""Multiplications and additions of a batch, from its shapes: the ratio of two ways that work could give.

Counted, each multiplication with its addition as 2: the linear layers of every token, attention's two products
over the keys that a kernel visits, the vision tower with its merger, and the language-model head where there is one.
Norms, activations, rotary embeddings and the scalar head are left out; they are less than a hundredth.
`attention=False` leaves attention's products out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Qwen2_5_VLConfig

from vlmrm.batching.shared import PackedLayout
from vlmrm.rendering import Rendered


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


def of_padded(config: Qwen2_5_VLConfig, conversations: Sequence[Rendered], attention: bool = True) -> Work:
    """Count one padded row per conversation, each with its own images, and logits for every token."""
    text: Any = config.text_config
    lengths = [len(item) for item in conversations]
    rows, width = len(lengths), max(lengths)
    # Padding needs a mask, and with one the kernel visits the whole square; without, only half of it.
    visited = rows * width * width / (1 if min(lengths) < width else 2)
    grids = [grid for item in conversations for grid in _grids(item)]
    return Work(
        _text(config, rows * width, visited * attention, last=rows * width)
        + sum(vision(config, grid, attention) for grid in grids),
        2 * rows * width * text.hidden_size * text.vocab_size,
        rows * width,
    )


def of_shared(config: Qwen2_5_VLConfig, inputs: dict[str, Any], attention: bool = True) -> Work:
    """Count one packed row, from the inputs of a `SharedBatcher`."""
    layout: PackedLayout = inputs["layout"]
    visited = 0.0
    for span in layout.spans:
        queries = span.stop - span.start
        visited += queries * (span.before + queries) if span.before else queries * queries / 2
    tokens = inputs["input_ids"].shape[1]
    grids = inputs["media"]["image"]["tensors"]["image_grid_thw"].tolist()
    vision_work = sum(vision(config, grid, attention) for grid in grids)
    return Work(_text(config, tokens, visited * attention, last=len(layout.last_tokens)) + vision_work, 0, tokens)


def _text(config: Qwen2_5_VLConfig, tokens: int, visited: float, last: int) -> float:
    """Count the layers of the language model, for `visited` pairs of query and key; in the last layer, the
    feed-forward part is computed for `last` tokens only."""
    text: Any = config.text_config
    hidden = text.hidden_size
    head = hidden // text.num_attention_heads
    query, key = text.num_attention_heads * head, text.num_key_value_heads * head
    projections = 2 * (2 * hidden * query + 2 * hidden * key)
    forward = 2 * 3 * hidden * text.intermediate_size
    layers = text.num_hidden_layers * (tokens * (projections + forward) + visited * 4 * query)
    return layers - (tokens - last) * forward


def vision(config: Qwen2_5_VLConfig, grid: Sequence[int], attention: bool = True) -> float:
    """Count the vision tower and merger for an image of `grid` (time, height, width) in patches."""
    tower: Any = config.vision_config
    patches, width, merged = grid[0] * grid[1] * grid[2], tower.hidden_size, tower.spatial_merge_size**2
    window = (tower.window_size // tower.patch_size) ** 2
    full_layers = len(tower.fullatt_block_indexes)
    embedding = 2 * tower.in_channels * tower.temporal_patch_size * tower.patch_size**2 * width
    linear = 2 * (4 * width * width + 3 * width * tower.intermediate_size)
    keys = full_layers * patches + (tower.depth - full_layers) * min(patches, window)
    merger = 2 * (merged * width * merged * width + merged * width * tower.out_hidden_size)
    return patches * (embedding + tower.depth * linear + 4 * width * keys * attention) + patches / merged * merger


def _grids(item: Rendered) -> list[list[int]]:
    return [grid for medium in item.media for grid in medium.tensors["image_grid_thw"].tolist()]
