"""Turn conversations and comparisons into batches of tensors."""

from collections.abc import Mapping
from typing import Any

import torch

from vlmrm.batching.collator import Batch, Batcher, ComparisonCollator, PaddedBatcher, Part
from vlmrm.batching.shared import SharedBatcher, on_device


def to_device(inputs: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return a batcher's output with its tensors on `device`, those of nested dictionaries too.

    Do not write to the tensors afterwards (`on_device`).
    """
    return {
        name: on_device(value, device)
        if isinstance(value, torch.Tensor)
        else to_device(value, device)
        if isinstance(value, dict)
        else value
        for name, value in inputs.items()
    }


__all__ = ["Batch", "Batcher", "ComparisonCollator", "PaddedBatcher", "Part", "SharedBatcher", "to_device"]
