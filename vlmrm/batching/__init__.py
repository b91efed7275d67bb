"""Conversations and comparisons → batches of tensors."""

from vlmrm.batching.collator import Batch, Batcher, ComparisonCollator
from vlmrm.batching.padded import PaddedBatcher

__all__ = ["Batch", "Batcher", "ComparisonCollator", "PaddedBatcher"]
