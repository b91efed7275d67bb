"""Give every rank the same amount of work: estimate the tokens of each row, and build batches of similar cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from vlmrm.conversation import Comparison, Medium, Reference, Video, media_of, text_of
from vlmrm.data.comparisons import iterate_comparisons
from vlmrm.data.media import image_size, media_key
from vlmrm.errors import RowError
from vlmrm.rendering import MediaLimits

CHARACTERS_PER_TOKEN = 4  # English text, roughly
PIXELS_PER_TOKEN = 28 * 28  # Qwen-VL family
DEFAULT_MAX_PIXELS = 16384 * PIXELS_PER_TOKEN  # Qwen2.5-VL's own limit


def estimated_costs(dataset, limits: MediaLimits) -> list[int]:
    """Estimate the tokens of every row from its texts and the headers of its images; a bad row costs 1."""
    return [_cost_or_one(row, limits) for row in iterate_comparisons(dataset)]


def _cost_or_one(row: Comparison | RowError, limits: MediaLimits) -> int:
    try:
        return 1 if isinstance(row, RowError) else estimated_cost(row, limits)
    except RowError:  # reported when the row is collated
        return 1


def estimated_cost(comparison: Comparison, limits: MediaLimits) -> int:
    """Estimate the tokens of prompt and answers, each image counted once; a video counts as one large image."""
    pieces = [comparison.prompt, *comparison.answers]
    characters = sum(len(text_of(messages)) for messages in pieces)
    distinct = {media_key(medium.reference): medium for messages in pieces for medium in media_of(messages)}
    return 1 + characters // CHARACTERS_PER_TOKEN + sum(_tokens(medium, limits) for medium in distinct.values())


def _tokens(medium: Medium, limits: MediaLimits) -> int:
    reference: Any = medium.reference
    if not isinstance(medium, Video):
        return _image_tokens(reference, limits)
    if isinstance(reference, tuple):
        return sum(_image_tokens(frame, limits) for frame in reference)
    return (limits.max_pixels or DEFAULT_MAX_PIXELS) // PIXELS_PER_TOKEN


def _image_tokens(reference: Reference, limits: MediaLimits) -> int:
    largest = limits.max_pixels or DEFAULT_MAX_PIXELS
    width, height = image_size(reference)
    return min(max(width * height, limits.min_pixels or 0), largest) // PIXELS_PER_TOKEN


class EvenBatches(BatchSampler):
    """The batches of a sampler, and empty ones until every rank has as many; accelerate would repeat rows."""

    def __init__(self, batches: BatchSampler, ranks: int):
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self.ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()
        yield from ([] for _ in range(-super().__len__() % self.ranks))

    def __len__(self) -> int:
        return super().__len__() + -super().__len__() % self.ranks


class BalancedBatches(BatchRebalanceSampler):
    """Shuffle as HF's sampler does, and spread each step's packed rows over ranks and accumulated batches.

    HF balances padded batches by varying their sizes. Here nothing is padded: every batch keeps its size, and rows go,
    largest first, to the batch with the least work that has room. A last step of fewer rows than batches has empty
    ones, where HF would repeat rows.
    """

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self.has_tail = False  # one that HF would fill

    def _assign(self, indices: Sequence[int], lengths: Sequence[int]) -> list[list[list[int]]]:
        """Return the rows of one step as batches[rank][accumulation step]."""
        batches: list[list[int]] = [[] for _ in range(self.dp_size * self.grad_accum)]
        work = [0] * len(batches)
        room = -(-len(indices) // len(batches))
        for cost, index in sorted(zip(lengths, indices, strict=True), reverse=True):
            lightest = min((i for i in range(len(batches)) if len(batches[i]) < room), key=work.__getitem__)
            batches[lightest].append(index)
            work[lightest] += cost
        # Batches that run at the same time on different ranks should have similar work, or ranks would wait.
        heaviest_first = [batches[i] for i in sorted(range(len(batches)), key=work.__getitem__, reverse=True)]
        return [heaviest_first[rank :: self.dp_size] for rank in range(self.dp_size)]
