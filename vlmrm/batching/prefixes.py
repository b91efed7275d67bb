"""Prompts that are computed once for many rows: their names, and what the layers keep of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kept:
    """Hold what the layers, in order, have computed of the first `tokens` of a conversation.

    Attention keeps keys and values [1, H, tokens, D], a recurrence its state, a convolution its last inputs.
    """

    tokens: int
    layers: list[Tensors] = field(default_factory=list)

    def tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield from layer


@dataclass(frozen=True)
class Keep:
    """Name a prefix that the layers keep: its last segment, its `ranges` in the row, and where they keep it."""

    segment: int
    ranges: Sequence[tuple[int, int]]
    kept: Kept


def named(identities: np.ndarray, media: Sequence[Sequence[str]]) -> str:
    """Return a digest of token identities: -1 - i stands for the `media[i]`."""
    present = media[: 1 + max(-1 - int(identities.min()), -1)]
    return blake2b(identities.astype("<i8").tobytes() + repr(list(map(list, present))).encode()).hexdigest()
