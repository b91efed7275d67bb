"""One model over one data set: the scores of every branch of every comparison, on one process or shared among many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlmrm.batching import ComparisonCollator, scores_by_ablation, to_device
from vlmrm.batching.workers import plain_worker_errors
from vlmrm.data.schema import Comparison
from vlmrm.evaluation.ablations import Ablation, donor_of
from vlmrm.modeling import RewardModel


@dataclass
class Evaluation:
    """Comparisons with the score of each branch, and the rows that could not be scored as (id, reason).

    `ablated[i]` has, by name of the ablation, the scores of the branches of comparison i as it was changed.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    ablated: list[dict[str, list[float]]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _Share:
    """A rank's rows of a data set: every `ranks`-th block of `block`, so that neighbours stay together.

    Rows have their place in the data set as `index` and, where asked for, the next comparison with a fitting other
    prompt as `donor`: a function of the data set alone, whatever the batches and ranks.
    """

    dataset: Any
    block: int
    rank: int
    ranks: int
    with_donors: bool

    def places(self) -> list[int]:
        starts = range(self.rank * self.block, len(self.dataset), self.ranks * self.block)
        return [place for start in starts for place in range(start, min(start + self.block, len(self.dataset)))]

    def __post_init__(self):
        self._places = self.places()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        places = [self._places[number] for number in numbers]
        comparisons = self.dataset[places]["comparison"]
        rows = [{"index": place, "comparison": c} for place, c in zip(places, comparisons, strict=True)]
        if self.with_donors:
            for row in rows:
                row["donor"] = donor_of(row["comparison"], row["index"], self.dataset)
        return rows


@dataclass
class _KeepComparisons:
    """Collates, and hands on the comparisons by place beside the batch. A class, so that workers can receive it."""

    collator: ComparisonCollator

    def __call__(self, rows: list[dict[str, Any]]) -> tuple[dict[int, Comparison], dict[str, Any]]:
        kept = {row["index"]: row["comparison"] for row in rows if isinstance(row["comparison"], Comparison)}
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
    ablations: Mapping[str, Ablation] | None = None,
    description: str = "scoring",
) -> Evaluation:
    """Scores every row of `dataset` (rows of `load_comparisons`) once, and each of its `ablations` beside it.

    Of several ranks each takes a share, and all get the whole result in the data set's order.

    Raises:
        OutOfMemoryError: on every rank, when one has no memory left.
    """
    share: Any = _Share(dataset, batch_size, rank, ranks, with_donors=bool(ablations))
    loader = DataLoader(
        share,
        batch_size=batch_size,
        collate_fn=_KeepComparisons(replace(collator, ablations=ablations or {})),
        num_workers=num_workers,
    )
    comparisons: dict[int, Comparison] = {}
    scored: list[tuple[int, str | None, list[float]]] = []
    dropped: list[tuple[str, str]] = []
    full: str | None = None
    progress = tqdm(loader, desc=description, unit="batch", leave=False, disable=None if rank == 0 else True)
    try:
        with plain_worker_errors():
            for kept, batch in progress:
                comparisons |= kept
                for part in batch["parts"]:
                    scores = model(**to_device(part["inputs"], model.device)).logits.squeeze(-1).float().tolist()
                    scored += scores_by_ablation(part, scores)
                dropped += batch["dropped"]
    except torch.OutOfMemoryError as error:
        full = " ".join(str(error).split())
    # A rank without memory must not leave the others waiting for its scores.
    for failure in gather_object([full]):
        if failure is not None:
            raise torch.OutOfMemoryError(failure)
    comparisons = dict(gather_object(list(comparisons.items())))
    by_place: dict[int, dict[str | None, list[float]]] = {}
    for place, name, values in gather_object(scored):
        by_place.setdefault(place, {})[name] = values
    result = Evaluation(dropped=gather_object(dropped))
    for place in sorted(by_place):
        result.comparisons.append(comparisons[place])
        result.scores.append(by_place[place].pop(None))
        result.ablated.append({name: values for name, values in by_place[place].items() if name is not None})
    return result
