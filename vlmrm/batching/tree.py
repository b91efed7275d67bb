"""Merge conversations into a tree of token segments that stores a common prefix once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Sharing a segment saves its tokens on all paths but one, and cuts attention into more pieces. A prefix that saves
# less than this share of the tokens of its branch of the tree (a system prompt before thousand-token images) is
# repeated instead. In that tree every prefix counts once: each frame of an episode saves little beside the sum of its
# later prefixes, and much beside what they cost.
MIN_SAVING = 0.05


@dataclass(frozen=True)
class Segment:
    """Mark tokens `begin` to `end` of sequence `sequence`; they continue segment `parent` (-1: none).

    A `held` segment is a cached prefix: its tokens are not computed again.
    """

    sequence: int
    begin: int
    end: int
    parent: int
    held: bool = False

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Tree:
    """Represent token sequences as paths of segments, parents first; a common prefix is stored once.

    Sequence i ends with the last token of segment `ends[i]`. Answers follow their prompt, so chosen and rejected, K
    ranked answers, candidates, and answers under another row's prompt are one case. So are several questions about one
    image: their paths part after the image.
    """

    segments: Sequence[Segment]
    ends: Sequence[int]

    def path(self, index: int) -> list[int]:
        """Return the segments from the root to segment `index`, both included."""
        path = [index]
        while (parent := self.segments[path[-1]].parent) >= 0:
            path.append(parent)
        return path[::-1]

    def __len__(self) -> int:
        """Return the number of tokens that are computed."""
        return sum(len(segment) for segment in self.segments if not segment.held)


def grow(sequences: Sequence[np.ndarray], cuts: Sequence[int] | None = None) -> Tree:
    """Build the tree of integer sequences [T_i], none of them empty. Equal sequences share their end.

    Only equality of integers matters: tokens of different images must be different integers. A segment ends after the
    first `cuts[i]` integers of sequence i (0: wherever it may).
    """
    keys = [sort_key(sequence) for sequence in sequences]
    # In lexicographic order sequences with a common prefix are neighbours, so prefixes of neighbours are enough.
    rank_of = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    order = [keys.index(key) for key in rank_of]
    lengths = [len(sequences[i]) for i in order]
    cut = [cuts[i] for i in order] if cuts is not None else [0] * len(order)
    shared = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    segments: list[Segment] = []
    ends = [-1] * len(order)

    def add(low: int, high: int, begin: int, parent: int) -> None:
        """Add the sorted sequences low to high below `parent`; they agree up to `begin`."""
        end = min([lengths[low], *shared[low : high - 1], *(stop for stop in cut[low:high] if stop > begin)])
        parts = list(pairwise([low, *(i + 1 for i in range(low, high - 1) if shared[i] == end), high]))
        # What sharing this segment saves, and the tokens of the branch from here on with every prefix counted once.
        saved = (len(parts) - 1) * (end - begin)
        computed = sum(lengths[low:high]) - sum(shared[low : high - 1]) - begin
        if end > begin and (len(parts) == 1 or saved >= MIN_SAVING * computed):
            segments.append(Segment(order[low], begin, end, parent))
            begin, parent = end, len(segments) - 1
        # The path of most sequences first: its segments are neighbours in the row, and attention takes them at once.
        for first, last in sorted(parts, key=lambda part: part[0] - part[1]):
            if lengths[first] == begin:
                ends[first] = parent
            else:
                add(first, last, begin, parent)

    if order:
        add(0, len(order), 0, -1)
    return Tree(segments, [ends[rank_of[key]] for key in keys])


def grow_after(sequences: Sequence[np.ndarray], cuts: Sequence[int], held: Sequence[Hashable]) -> Tree:
    """Build the tree of sequences, some with a held (cached) prefix: the first `cuts[i]` integers of sequence i.

    `held[i]` names that prefix. None: it is computed, and a segment ends with it, as in `grow`.
    """
    segments: list[Segment] = []
    ends = [-1] * len(sequences)
    for name in dict.fromkeys(held):
        members = [i for i, other in enumerate(held) if other == name]
        begin, root = 0, -1
        if name is not None:
            begin, root = cuts[members[0]], len(segments)
            segments.append(Segment(members[0], 0, begin, -1, held=True))
        tree = grow([sequences[i][begin:] for i in members], None if begin else [cuts[i] for i in members])
        first = len(segments)
        for s in tree.segments:
            parent = root if s.parent < 0 else first + s.parent
            segments.append(Segment(members[s.sequence], begin + s.begin, begin + s.end, parent))
        for i, end in zip(members, tree.ends, strict=True):
            ends[i] = first + end
    return Tree(segments, ends)


def sort_key(sequence: np.ndarray) -> bytes:
    """Return bytes that sort lexicographically as the sequence does, a prefix before its continuations."""
    return sequence.astype(">i8").tobytes()


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def tokens_after(before: np.ndarray | None, sequences: Sequence[np.ndarray]) -> int:
    """Count the tokens that sorted `sequences` add to a tree; `before` is its last sequence, if it has any."""
    count = 0
    for sequence in sequences:
        count += len(sequence) - (0 if before is None else common_prefix(before, sequence))
        before = sequence
    return count
