"""Which tokens of a packed row see which: each segment itself, causally, and the segments before it on its path.

The attention functions of `vlmrm.modeling.shared_attention` read it; it travels beside the tensors of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vlmrm.batching.tree import Tree


@dataclass(frozen=True)
class Span:
    """The queries `start` to `stop`, of one segment or of several on one path, and the ranges of keys that the last of
    them sees; the last range ends with the queries' own."""

    start: int
    stop: int
    keys: Sequence[tuple[int, int]]

    @property
    def before(self) -> int:
        """Keys on the path before the span's own."""
        return sum(stop - start for start, stop in self.keys) - (self.stop - self.start)


@dataclass(eq=False)
class Layout:
    """The spans of a packed row, in row order: together they are the row; and where in it conversations end."""

    spans: Sequence[Span]
    last_tokens: Sequence[int]
    _ends: torch.Tensor | None = field(default=None, init=False)
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False)
    _gathered: Gathered | None = field(default=None, init=False)

    @classmethod
    def of(cls, tree: Tree) -> Layout:
        """The layout of a tree whose segments stand in the row one after another, as few spans as there can be."""
        starts = [0]
        for segment in tree.segments:
            starts.append(starts[-1] + len(segment))
        spans: list[Span] = []
        for number in range(len(tree.segments)):
            keys: list[tuple[int, int]] = []
            for i in tree.path(number):
                if keys and keys[-1][1] == starts[i]:
                    keys[-1] = (keys[-1][0], starts[i + 1])  # neighbours in the row need no copy
                else:
                    keys.append((starts[i], starts[i + 1]))
            start = starts[number]
            if spans and keys == [*spans[-1].keys[:-1], (spans[-1].keys[-1][0], starts[number + 1])]:
                start = spans.pop().start  # it goes on from the span before it, as a first answer does from its prompt
            spans.append(Span(start, starts[number + 1], keys))
        return cls(spans, sorted({starts[number + 1] - 1 for number in tree.ends}))

    def __len__(self) -> int:
        """Tokens in the row."""
        return self.spans[-1].stop

    @property
    def longest(self) -> int:
        """Tokens of the longest path: the most that any query sees."""
        return max(self._lengths()[1])

    def ends(self, device: torch.device) -> torch.Tensor:
        """The last tokens of the conversations [N], each position once, in row order."""
        if self._ends is None or self._ends.device != device:
            self._ends = torch.tensor(self.last_tokens, device=device)
        return self._ends

    def mask(self, span: Span, device: torch.device) -> torch.Tensor:
        """Which keys[K] each query[Q] of the span sees, boolean [Q, K]: bottom-right causal."""
        shape = (span.stop - span.start, span.before)
        if shape not in self._masks:
            queries, before = shape
            self._masks[shape] = torch.ones(queries, before + queries, dtype=torch.bool, device=device).tril(before)
        return self._masks[shape]

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Queries and keys of each span."""
        queries = [span.stop - span.start for span in self.spans]
        return queries, [length + span.before for length, span in zip(queries, self.spans, strict=True)]

    def gathered(self, device: torch.device) -> Gathered:
        """The same for kernels of variable length, made once for all layers."""
        if self._gathered is None or self._gathered.keys.device != device:
            queries, keys = self._lengths()
            index = torch.cat([torch.arange(a, b) for span in self.spans for a, b in span.keys])
            self._gathered = Gathered(
                index.to(device), _cumulative(queries, device), _cumulative(keys, device), max(queries), max(keys)
            )
        return self._gathered


@dataclass(frozen=True)
class Gathered:
    """`keys` [K]: row positions of every span's keys, spans one after another. `cu_*` [spans + 1]: where each begins,
    int32."""

    keys: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int


def _cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
