"""One model over one data set: the scores of every branch of every comparison, on one process or shared among many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlmrm.batching import ComparisonCollator, scores_by_row, to_device
from vlmrm.batching.workers import plain_worker_errors
from vlmrm.data.schema import Comparison
from vlmrm.evaluation.metrics import ScoredPairs, scored_pairs
from vlmrm.modeling import RewardModel


@dataclass
class Evaluation:
    """Comparisons with the score of each branch, and the rows that could not be scored as (id, reason)."""

    comparisons: list[Comparison] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)

    def pairs(self) -> ScoredPairs:
        return scored_pairs(self.comparisons, self.scores)


@dataclass
class _Share:
    """Every `count`-th row of a data set, from row `first`, with its place there as `index`."""

    dataset: Any
    first: int
    count: int

    def __len__(self) -> int:
        return len(range(self.first, len(self.dataset), self.count))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        places = [self.first + number * self.count for number in numbers]
        comparisons = self.dataset[places]["comparison"]
        return [{"index": place, "comparison": c} for place, c in zip(places, comparisons, strict=True)]


@dataclass
class _KeepComparisons:
    """Collates rows as `change` makes them, and hands on the unchanged comparisons by place beside the batch."""

    collator: ComparisonCollator
    change: Callable[[Comparison], Comparison] | None

    def __call__(self, rows: list[dict[str, Any]]) -> tuple[dict[int, Comparison], dict[str, Any]]:
        kept = {row["index"]: row["comparison"] for row in rows if isinstance(row["comparison"], Comparison)}
        if self.change is not None:
            change = self.change
            rows = [{**row, "comparison": change(row["comparison"])} if row["index"] in kept else row for row in rows]
        return kept, self.collator(rows)


@torch.inference_mode()
def evaluate(
    model: RewardModel,
    collator: ComparisonCollator,
    dataset,
    *,
    batch_size: int,
    num_workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    change: Callable[[Comparison], Comparison] | None = None,
    description: str = "scoring",
) -> Evaluation:
    """Scores every row of `dataset` (rows of `load_comparisons`) once, shown to the model as `change` makes it.

    Of several ranks each takes every `ranks`-th row, and all get the whole result in the data set's order.
    """
    share: Any = _Share(dataset, rank, ranks)
    loader = DataLoader(
        share,
        batch_size=batch_size,
        collate_fn=_KeepComparisons(collator, change),
        num_workers=num_workers,
    )
    scored: list[tuple[int, Comparison, list[float]]] = []
    dropped: list[tuple[str, str]] = []
    progress = tqdm(loader, desc=description, unit="batch", leave=False, disable=None if rank == 0 else True)
    with plain_worker_errors():
        for comparisons, batch in progress:
            for part in batch["parts"]:
                scores = model(**to_device(part["inputs"], model.device)).logits.squeeze(-1).float().tolist()
                scored += [(place, comparisons[place], values) for place, values in scores_by_row(part, scores)]
            dropped += batch["dropped"]
    ordered = sorted(gather_object(scored), key=lambda row: row[0])
    return Evaluation([row[1] for row in ordered], [row[2] for row in ordered], gather_object(dropped))
