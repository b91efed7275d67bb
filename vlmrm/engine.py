"""Score conversations with a reward model: render, batch under the token budget, forward, reorder.

Every score that anybody is given comes from here, and is checked to be finite. A training step runs the model itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader

from vlmrm.batching import Batch, ComparisonCollator, Part, to_device
from vlmrm.batching.collator import branches_of, plain_worker_errors
from vlmrm.batching.pieces import log_cut
from vlmrm.errors import RowError, ScoreError, finite_or_error
from vlmrm.modeling.head import named_numbers
from vlmrm.outputs import ONE, Outputs
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
    outputs: dict[str, list[float]] = field(default_factory=dict)  # of a model of several, each branch's value by name
    altered_outputs: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # the same by intervention
    error: RowError | None = None
    failed: dict[str, str] = field(default_factory=dict)
    verdicts: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)


@dataclass
class Engine:
    """A reward model with the collator of its inputs. A score does not depend on the rest of its batch."""

    model: Any  # returns `logits` [N, C] for a batcher's inputs; in distributed training the wrapped model
    collator: ComparisonCollator
    device: torch.device | None = None  # of the inputs; by default the model's
    prefixes: PrefixCache | None = None  # kept between calls; scores that need a gradient do without

    @property
    def interventions(self) -> Mapping[str, Any]:
        return self.collator.interventions

    def forward(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits [N, C], float32, of a batcher's inputs; differentiable where gradients are enabled."""
        return self.model(**to_device(inputs, self.device or self.model.device)).logits.float()

    def logits(self, rendered: Sequence[Rendered]) -> torch.Tensor:
        """Return the logits [N, C], float32, of conversations in their order; differentiable as `forward`."""
        if not rendered:
            return torch.zeros(0, self.outputs.columns)
        parts = self.collator.split([[item] for item in rendered])
        logits = torch.cat([self._logits_of([rendered[n] for n in part]) for part in parts])
        return logits[torch.tensor([n for part in parts for n in part]).argsort().to(logits.device)]

    def _logits_of(self, part: list[Rendered]) -> torch.Tensor:
        part = branches_of(part)
        if self.prefixes is None or torch.is_grad_enabled():
            return self.forward(self.collator.batcher(part))
        inputs = self.prefixes.inputs(part)
        logits = self.forward(inputs)
        self.prefixes.keep(inputs)
        return logits

    @property
    def outputs(self) -> Outputs:
        return self.collator.outputs

    @torch.inference_mode()
    def score(self, items: Sequence[Rendered | RowError]) -> list[float | RowError]:
        """Return the raw score of each rendered item in order, or its error."""
        return [item if isinstance(item, RowError) else self.outputs.number(item) for item in self.outputs_of(items)]

    @torch.inference_mode()
    def outputs_of(self, items: Sequence[Rendered | RowError]) -> list[dict[str, float] | RowError]:
        """Return the value of each output by name for each rendered item in order, or its error."""
        logits = self.logits([item for item in items if isinstance(item, Rendered)])
        named = iter(named_numbers(self.outputs, logits))
        return [_finite(next(named)) if isinstance(item, Rendered) else item for item in items]

    @torch.inference_mode()
    def rows(self, dataset: Any, *, batch_size: int, num_workers: int = 0) -> Iterator[ScoredRow]:
        """Score a data set for the collator, rendered by `num_workers` processes ahead of the model.

        The rows of a batch are sorted by index; those that the collator drops have an error.
        """
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=self.collator, num_workers=num_workers)
        with plain_worker_errors():
            for batch in loader:
                yield from self.score_batch(batch)

    def scores(self, part: Part) -> torch.Tensor:
        """Return the logits [N, C], float32, of a part of a batch, differentiable as `forward`."""
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
        named = iter(named_numbers(self.outputs, self.scores(part)))
        table = part["rows"]
        counts = zip(table["index"].tolist(), table["id"], table["branches"].tolist(), strict=True)

        def take(count: int) -> tuple[list[float], dict[str, list[float]]]:
            values = [*islice(named, count)]
            outputs = {} if self.outputs == ONE else {name: [it[name] for it in values] for name in values[0]}
            return [*map(self.outputs.number, values)], outputs

        rows = {}
        for index, row_id, count in counts:
            scores, outputs = take(count)
            rows[index] = ScoredRow(index, row_id, scores, outputs=outputs)
        for index, name, count in part["altered"]:
            rows[index].altered[name], rows[index].altered_outputs[name] = take(count)
        return [checked(row) for row in rows.values()]


def workers_beside(device: Any, asked: int | None = None) -> int:
    """Return how many processes prepare rows for a model: those asked for, else up to four beside a GPU.

    None beside a CPU, and where the shared memory that rows come through is small: containers have 64 MiB by default.
    """
    if asked is not None:
        return asked
    if device.type != "cuda" or disk_usage("/dev/shm").free < 8 * 2**30:
        return 0
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(min(cores - 1, 4), 0)


def rendered_each(
    items: Sequence[Item], render: Render[Item], media: Mapping[str, ProcessedMedia] | None = None
) -> list[Rendered | RowError]:
    """Return each item as tokens, or its error; a bad item does not stop the rest.

    `render` turns an item into tokens; its second argument is a cache of media that items share, with `media` in it.
    """
    cache = dict(media or {})
    rendered: list[Rendered | RowError] = []
    for item in items:
        try:
            rendered.append(render(item, cache))
        except RowError as error:
            rendered.append(error)
    return rendered


def _finite(values: dict[str, float]) -> dict[str, float] | RowError:
    errors = (finite_or_error(value, name) for name, value in values.items())
    return next((error for error in errors if isinstance(error, ScoreError)), values)


def checked(row: ScoredRow) -> ScoredRow:
    """Return the row, or its error when one of its scores is not finite."""
    altered = {f"{name} score": scores for name, scores in row.altered.items()}
    altered |= {f"{name} {it}": of[it] for name, of in row.altered_outputs.items() for it in of}
    for label, scores in {"score": row.scores, **row.outputs, **altered}.items():
        for score in scores:
            if isinstance(error := finite_or_error(score, label, row.id), ScoreError):
                return ScoredRow(row.index, row.id, error=error)
    return row
