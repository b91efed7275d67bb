"""Comparisons → one batch: conversations as model inputs, and which scores to compare.

A batch is a dictionary that the trainer moves to the device as it is:

    inputs   what the model takes; it answers one score for each conversation
    pairs    [N] tensors over pairs of conversations: chosen, rejected (indices), margin, weight, tie, irrelevant
    rows     [R] tensors over the comparisons: index (in the data set), branches (how many scores are its own)
    counts   numbers for the logs: tokens, pairs
    dropped  (row id, reason) of each row left out

The scores of the comparisons' own branches come first, in order; those of irrelevant queries follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlmrm.data.irrelevant import IrrelevantQueries, best_and_worst
from vlmrm.data.schema import Comparison, Messages
from vlmrm.errors import RowError
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer

logger = logging.getLogger("vlmrm")

Batcher = Callable[[Sequence[Rendered]], dict[str, torch.Tensor]]
Batch = dict[str, Any]

# Stands in for a batch whose rows were all dropped, so that every rank still runs its step; it has no pairs.
NOTHING = [{"role": "user", "content": [{"type": "text", "text": "-"}]}]


@dataclass
class ComparisonCollator:
    """Rows `{"index", "comparison"}` → a batch. Runs in DataLoader workers: media are opened and processed here."""

    renderer: Renderer
    batcher: Batcher
    max_seq_length: int
    overlong: str = "drop"
    bad_rows: str = "error"
    irrelevant: IrrelevantQueries | None = None
    # Shared memory: workers see the epoch that the trainer sets.
    epoch: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.long).share_memory_())

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        cache: dict[str, ProcessedMedia] = {}
        kept: list[tuple[int, Comparison, list[Rendered]]] = []
        dropped: list[tuple[str, str]] = []
        for row in rows:
            comparison = row["comparison"]
            try:
                if isinstance(comparison, RowError):
                    raise comparison
                kept.append((row["index"], comparison, self._render(comparison, cache)))
            except OverlongError as error:
                if self.overlong == "error":
                    raise
                dropped.append((error.row_id or "", error.reason))
            except RowError as error:
                named = error if error.row_id is not None else type(error)(error.reason, comparison.id)
                if self.bad_rows == "error":
                    raise named from error
                dropped.append((named.row_id or "", named.reason))

        rendered = [item for _, _, branches in kept for item in branches]
        pairs = _Pairs()
        start = 0
        for _, comparison, branches in kept:
            for chosen, rejected, tie in comparison.pairs():
                pairs.add(start + chosen, start + rejected, comparison.margin, comparison.weight, tie=tie)
            start += len(branches)
        if self.irrelevant is not None:
            self._add_irrelevant([comparison for _, comparison, _ in kept], rendered, pairs, cache)

        inputs = self.batcher(rendered or [self.renderer.render(NOTHING)])
        return {
            "inputs": inputs,
            "pairs": pairs.tensors(),
            "rows": {
                "index": torch.tensor([index for index, _, _ in kept], dtype=torch.long),
                "branches": torch.tensor([len(branches) for _, _, branches in kept], dtype=torch.long),
            },
            "counts": {"tokens": sum(map(len, rendered)), "pairs": sum(len(c.pairs()) for _, c, _ in kept)},
            "dropped": dropped,
        }

    def _render(self, comparison: Comparison, cache: dict[str, ProcessedMedia]) -> list[Rendered]:
        """The conversations of a comparison, each within `max_seq_length`."""
        branches = [self._fit(messages, comparison.id, cache) for messages in comparison.conversations()]
        # Answers differ when they are read; what is left of them after a cut may not.
        if self.overlong == "trim" and any(_same(branches[i], branches[j]) for i, j, _ in comparison.pairs()):
            raise OverlongError(
                "its answers differ only past max_seq_length: raise it or lower max_pixels", comparison.id
            )
        return branches

    def _fit(self, messages: Messages, row_id: str, cache: dict[str, ProcessedMedia]) -> Rendered:
        rendered = self.renderer.render(messages, cache)
        if len(rendered) <= self.max_seq_length:
            return rendered
        trimmed = self.renderer.trim(messages, self.max_seq_length, cache) if self.overlong == "trim" else None
        if trimmed is None:
            raise OverlongError(
                f"{len(rendered)} tokens are over max_seq_length {self.max_seq_length}: raise it or lower max_pixels",
                row_id,
            )
        return trimmed

    def _add_irrelevant(
        self,
        comparisons: list[Comparison],
        rendered: list[Rendered],
        pairs: _Pairs,
        cache: dict[str, ProcessedMedia],
    ) -> None:
        assert self.irrelevant is not None
        epoch = int(self.epoch)
        self.irrelevant.remember(comparisons, epoch)
        for comparison in comparisons:
            answers = [comparison.branches[i].messages for i in best_and_worst(comparison)]
            for prompt in self.irrelevant.donors(comparison, comparisons, epoch):
                try:
                    both = [self._fit([*prompt, *answer], comparison.id, cache) for answer in answers]
                except RowError as error:  # the donor's: it is met, and reported, as a row of its own
                    logger.debug("no irrelevant query for row %s: %s", comparison.id, error)
                    continue
                pairs.add(len(rendered), len(rendered) + 1, None, comparison.weight, tie=True, irrelevant=True)
                rendered.extend(both)


class OverlongError(RowError):
    """A conversation over `max_seq_length`."""


class _Pairs:
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float, float, bool, bool]] = []

    def add(
        self, chosen: int, rejected: int, margin: float | None, weight: float, *, tie: bool, irrelevant: bool = False
    ) -> None:
        self.rows.append((chosen, rejected, 0.0 if margin is None or tie else margin, weight, tie, irrelevant))

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("chosen", "rejected", "margin", "weight", "tie", "irrelevant")
        dtypes = (torch.long, torch.long, torch.float32, torch.float32, torch.bool, torch.bool)
        columns = list(zip(*self.rows, strict=True)) or [()] * len(names)
        return {n: torch.tensor(column, dtype=d) for n, column, d in zip(names, columns, dtypes, strict=True)}


def _same(a: Rendered, b: Rendered) -> bool:
    return a.input_ids == b.input_ids and [m.key for m in a.media] == [m.key for m in b.media]
