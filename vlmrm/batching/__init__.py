"""Conversations and comparisons → batches of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmrm.batching.batcher import Batcher
from vlmrm.batching.collator import Batch, ComparisonCollator, Part
from vlmrm.batching.padded import PaddedBatcher
from vlmrm.batching.shared import SharedBatcher


def to_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A batcher's output with its tensors on `device`."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def scores_by_ablation(part: Part, scores: Sequence[float]) -> list[tuple[int, str | None, list[float]]]:
    """All scores of a part: (index of the comparison, name of the ablation or None, one score for each branch)."""
    rest = iter(scores)
    rows = zip(part["rows"]["index"].tolist(), part["rows"]["branches"].tolist(), strict=True)
    blocks = [*((index, None, count) for index, count in rows), *part["ablated"]]
    return [(index, name, [next(rest) for _ in range(count)]) for index, name, count in blocks]


__all__ = [
    "Batch",
    "Batcher",
    "ComparisonCollator",
    "PaddedBatcher",
    "Part",
    "SharedBatcher",
    "scores_by_ablation",
    "to_device",
]
