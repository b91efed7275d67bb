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
    """What layers keep of the first `tokens` of a conversation, in the order in which they compute.

    Attention keeps keys and values [1, H, tokens, D], a recurrence its state, a convolution its last inputs.
    """

    tokens: int
    layers: list[Tensors] = field(default_factory=list)

    def tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield from layer


@dataclass(frozen=True)
class Keep:
    """A prefix of which layers keep something: its `ranges` in the row, and the segment with which it ends."""

    segment: int
    ranges: Sequence[tuple[int, int]]
    kept: Kept


def named(identities: np.ndarray, media: Sequence[Sequence[str]]) -> str:
    """Return a digest of token identities, in which -1 - i stands for the `media[i]`."""
    shown = media[: 1 + max(-1 - int(identities.min()), -1)]
    return blake2b(identities.astype("<i8").tobytes() + repr(list(map(list, shown))).encode()).hexdigest()
