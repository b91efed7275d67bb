"""Batches that are collated once for all checkpoints of a training, whose processor and limits are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, ValuesView
from typing import Any

import torch
from torch.utils.data import Subset

from vlmrm.batching import Batch


class KeptBatches:
    """The first batches of each data set, as many as fit into `limit` bytes of tensors; others are collated again."""

    def __init__(self, limit: int):
        self.limit = limit
        self._kept: dict[Any, list[Batch]] = {}

    def batches(self, rows: Any, batch_size: int, collate: Callable[[Any], Iterator[Batch]]) -> Iterator[Batch]:
        """Yield the batches of `rows`, those that are not kept from `collate`.

        Args:
            rows: hashable; equal where a data set, and the share of it, are the same.
            collate: yields the batches of a part of `rows`, `batch_size` rows each.
        """
        kept = self._kept.setdefault(rows, [])
        yield from list(kept)
        first = len(kept) * batch_size
        if first >= len(rows):
            return
        full = False  # kept batches are the first ones, without a gap
        for batch in collate(Subset(rows, range(first, len(rows)))):
            size = _bytes(batch["parts"])
            full = full or size > self.limit
            if not full:
                self.limit -= size
                kept.append(batch)
            yield batch


def _bytes(values: Any) -> int:
    """Return the bytes of the tensors in nested dictionaries and lists."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    values = values.values() if isinstance(values, dict) else values
    return sum(map(_bytes, values)) if isinstance(values, (list, ValuesView)) else 0
