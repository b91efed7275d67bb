"""Conversations → a tree of segments: tokens that several of them begin with stand in it once.

A segment is a run of tokens that follows its parent's; a conversation is a path from a root. Answers follow their
prompt, so chosen and rejected, K ranked answers, candidates, and answers under another sample's prompt are one case,
and so are several questions about one image, whose paths part after the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Sharing a segment spares its tokens on all paths but one, and cuts attention into more pieces. A prefix worth less
# than this part of the tokens that follow it (a system prompt before thousand-token images) is repeated instead.
WORTH = 0.05


@dataclass(frozen=True)
class Segment:
    """Tokens `begin` to `end` of sequence number `sequence`, after the segment numbered `parent` (-1: none)."""

    sequence: int
    begin: int
    end: int
    parent: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Tree:
    """`segments`, parents first. Sequence i ends with the last token of segment `ends[i]`."""

    segments: Sequence[Segment]
    ends: Sequence[int]

    def path(self, number: int) -> list[int]:
        """The segments from the root to `number`, both included."""
        path = [number]
        while (parent := self.segments[path[-1]].parent) >= 0:
            path.append(parent)
        return path[::-1]

    def __len__(self) -> int:
        """Tokens that are computed."""
        return sum(map(len, self.segments))


def grow(sequences: Sequence[np.ndarray]) -> Tree:
    """The tree of integer sequences [T_i], none of them empty. Equal sequences share their end.

    Only whether two integers are equal matters: tokens of different images must be different integers.
    """
    keys = [sort_key(sequence) for sequence in sequences]
    place_of = {key: place for place, key in enumerate(sorted(set(keys)))}
    order = [keys.index(key) for key in place_of]
    lengths = [len(sequences[i]) for i in order]
    shared = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    segments: list[Segment] = []
    ends = [-1] * len(order)

    def add(low: int, high: int, begin: int, parent: int) -> None:
        """Adds the sorted sequences low to high, which agree up to `begin`, below `parent`."""
        end = min([lengths[low], *shared[low : high - 1]])
        cuts = [low, *(i + 1 for i in range(low, high - 1) if shared[i] == end), high]
        parts = list(pairwise(cuts))
        spared = (len(parts) - 1) * (end - begin)
        if end > begin and (len(parts) == 1 or spared >= WORTH * sum(n - begin for n in lengths[low:high])):
            segments.append(Segment(order[low], begin, end, parent))
            begin, parent = end, len(segments) - 1
        for first, last in parts:
            if lengths[first] == begin:
                ends[first] = parent
            else:
                add(first, last, begin, parent)

    if order:
        add(0, len(order), 0, -1)
    return Tree(segments, [ends[place_of[key]] for key in keys])


def sort_key(sequence: np.ndarray) -> bytes:
    """Sorts sequences that begin alike next to each other, and each before those that go on from it."""
    return sequence.astype(">i8").tobytes()


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens a and b begin with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
