"""One model over one data set: the scores of every branch of every comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from vlmrm.batching import ComparisonCollator, to_device
from vlmrm.batching.workers import plain_worker_errors
from vlmrm.data.schema import Comparison
from vlmrm.evaluation.metrics import ScoredPairs, scored_pairs


@dataclass
class Evaluation:
    """Comparisons with the score of each branch, and the rows that could not be scored as (id, reason)."""

    comparisons: list[Comparison] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)

    def pairs(self) -> ScoredPairs:
        return scored_pairs(self.comparisons, self.scores)


@dataclass
class _KeepComparisons:
    """Collates, and hands the comparisons on beside the batch. A class, so that spawned workers can receive it."""

    collator: ComparisonCollator
    change: Callable[[Comparison], Comparison] | None

    def __call__(self, rows: list[dict[str, Any]]) -> tuple[list[Comparison], dict[str, Any]]:
        originals = [row["comparison"] for row in rows]
        if self.change is not None:
            rows = [
                {**row, "comparison": self.change(row["comparison"])}
                if isinstance(row["comparison"], Comparison)
                else row
                for row in rows
            ]
        # Numbered within the batch, to find the comparison of each score again.
        batch = self.collator([{**row, "index": place} for place, row in enumerate(rows)])
        return [originals[place] for place in batch["rows"]["index"].tolist()], batch


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel,
    collator: ComparisonCollator,
    dataset,
    *,
    batch_size: int,
    num_workers: int = 0,
    change: Callable[[Comparison], Comparison] | None = None,
    description: str = "scoring",
) -> Evaluation:
    """Scores every row of `dataset` (rows of `load_comparisons`), shown to the model as `change` makes it."""
    loader = DataLoader(
        dataset, batch_size=batch_size, collate_fn=_KeepComparisons(collator, change), num_workers=num_workers
    )
    result = Evaluation()
    with plain_worker_errors():
        for comparisons, batch in tqdm(loader, desc=description, unit="batch", leave=False, disable=None):
            inputs = to_device(batch["inputs"], model.device)
            scores = iter(model(**inputs).logits.squeeze(-1).float().tolist())
            result.comparisons += comparisons
            result.scores += [[next(scores) for _ in range(count)] for count in batch["rows"]["branches"].tolist()]
            result.dropped += batch["dropped"]
    return result
