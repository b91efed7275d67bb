"""Score conversations with a reward model: render, batch under the token budget, forward, reorder.

Every score that anybody is given comes from here, and is checked to be finite. A training step runs the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from vlmrm.batching import Batch, ComparisonCollator, Part, to_device
from vlmrm.batching.collator import plain_worker_errors
from vlmrm.batching.pieces import log_cut
from vlmrm.errors import RowError, ScoreError, finite_or_error
from vlmrm.rendering import ProcessedMedia, Rendered

if TYPE_CHECKING:
    from vlmrm.batching.caches import PrefixCache

Item = TypeVar("Item")
Render = Callable[[Item, dict[str, ProcessedMedia]], Rendered]


@dataclass(frozen=True)
class ScoredRow:
    """The raw score of each branch of a row, also under each intervention by name; or its error."""

    index: int
    id: str
    scores: list[float] = field(default_factory=list)
    altered: dict[str, list[float]] = field(default_factory=dict)
    error: RowError | None = None
    failed: dict[str, str] = field(default_factory=dict)
    verdicts: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)


@dataclass
class Engine:
    """A reward model with the collator of its inputs. A score does not depend on the rest of its batch."""

    model: Any  # returns `logits` [N, 1] for a batcher's inputs; in distributed training the wrapped model
    collator: ComparisonCollator
    device: torch.device | None = None  # of the inputs; by default the model's
    prefixes: PrefixCache | None = None  # kept between calls; scores that need a gradient do without

    @property
    def interventions(self) -> Mapping[str, Any]:
        return self.collator.interventions

    def forward(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the raw logits [N], float32, of a batcher's inputs; differentiable where gradients are enabled."""
        return self.model(**to_device(inputs, self.device or self.model.device)).logits.squeeze(-1).float()

    def logits(self, rendered: Sequence[Rendered]) -> torch.Tensor:
        """Return the raw logits [N], float32, of conversations in their order; differentiable as `forward`."""
        if not rendered:
            return torch.zeros(0)
        parts = self.collator.split([[item] for item in rendered])
        logits = torch.cat([self._logits_of([rendered[n] for n in part]) for part in parts])
        return logits[torch.tensor([n for part in parts for n in part]).argsort().to(logits.device)]

    def _logits_of(self, part: list[Rendered]) -> torch.Tensor:
        if self.prefixes is None or torch.is_grad_enabled():
            return self.forward(self.collator.batcher(part))
        inputs = self.prefixes.inputs(part)
        logits = self.forward(inputs)
        self.prefixes.keep(inputs)
        return logits

    @torch.inference_mode()
    def score(self, items: Sequence[Item], render: Render[Item]) -> list[float | RowError]:
        """Return the raw score of each item in order, or its error; a bad item does not stop the rest.

        `render` turns an item into tokens; its second argument is a cache of media that items share.
        """
        return self.score_rendered(rendered_each(items, render))

    @torch.inference_mode()
    def score_rendered(self, items: Sequence[Rendered | RowError]) -> list[float | RowError]:
        """Return the raw score of each rendered item in order, or its error."""
        scores = map(finite_or_error, self.logits([item for item in items if isinstance(item, Rendered)]).tolist())
        return [next(scores) if isinstance(item, Rendered) else item for item in items]

    @torch.inference_mode()
    def rows(self, dataset: Any, *, batch_size: int, num_workers: int = 0) -> Iterator[ScoredRow]:
        """Score a data set for the collator, rendered by `num_workers` processes ahead of the model.

        The rows of a batch are sorted by index; those that the collator drops have an error.
        """
        # Two workers would both read a stream from its start.
        workers = min(num_workers, 1) if isinstance(dataset, IterableDataset) else num_workers
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=self.collator, num_workers=workers)
        with plain_worker_errors():
            for batch in loader:
                yield from self.score_batch(batch)

    def scores(self, part: Part) -> torch.Tensor:
        """Return the raw logits [N], float32, of a part of a batch, differentiable as `forward`."""
        log_cut(*part["cut"], self.collator.max_tokens_per_batch)
        logits = torch.cat([self.forward(inputs) for inputs in part["inputs"]])
        return logits[part["order"].to(logits.device)]

    def score_batch(self, batch: Batch) -> list[ScoredRow]:
        """Return the rows of a collated batch.

        Unlike `rows` it does not enter inference mode, in which ZeRO-3 and FSDP cannot gather weights.
        """
        rows = [row for part in batch["parts"] for row in self._score_part(part)]
        rows += [ScoredRow(index, error.row_id or "", error=error) for index, error in batch["dropped"]]
        return sorted(rows, key=lambda row: row.index)

    def _score_part(self, part: Part) -> list[ScoredRow]:
        scores = iter(self.scores(part).tolist())
        table = part["rows"]
        counts = zip(table["index"].tolist(), table["id"], table["branches"].tolist(), strict=True)
        rows = {index: ScoredRow(index, row_id, [*islice(scores, count)]) for index, row_id, count in counts}
        for index, name, count in part["altered"]:
            rows[index].altered[name] = [*islice(scores, count)]
        return [checked(row) for row in rows.values()]


def rendered_each(
    items: Sequence[Item], render: Render[Item], media: Mapping[str, ProcessedMedia] | None = None
) -> list[Rendered | RowError]:
    """Return each item as tokens, or its error; `render` is that of `Engine.score`, `media` what is processed."""
    cache = dict(media or {})
    rendered: list[Rendered | RowError] = []
    for item in items:
        try:
            rendered.append(render(item, cache))
        except RowError as error:
            rendered.append(error)
    return rendered


def checked(row: ScoredRow) -> ScoredRow:
    """Return the row, or its error when one of its scores is not finite."""
    altered = {f"{name} score": scores for name, scores in row.altered.items()}
    for label, scores in {"score": row.scores, **altered}.items():
        for score in scores:
            if isinstance(error := finite_or_error(score, label, row.id), ScoreError):
                return ScoredRow(row.index, row.id, error=error)
    return row
