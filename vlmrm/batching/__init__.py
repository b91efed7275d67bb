"""Conversations and comparisons → batches of tensors."""

from vlmrm.batching.collator import Batch, Batcher, ComparisonCollator
from vlmrm.batching.padded import PaddedBatcher
from vlmrm.batching.workers import plain_worker_errors

__all__ = ["Batch", "Batcher", "ComparisonCollator", "PaddedBatcher", "plain_worker_errors"]
