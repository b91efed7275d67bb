"""One model over one data set: the scores of every branch of every comparison, on one process or shared among many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlmrm.batching import ComparisonCollator, scores_by_ablation, to_device
from vlmrm.batching.workers import plain_worker_errors
from vlmrm.conversation import Comparison
from vlmrm.data.sources import comparisons_of
from vlmrm.errors import VlmrmError
from vlmrm.evaluation.ablations import NEAR, Ablation, Traits, donor_of, traits_of
from vlmrm.modeling import RewardModel


class _Rows(Sequence[Comparison]):
    """The comparisons of some rows of a data set, read anew each time: images in them may be more than memory."""

    def __init__(self, dataset: Any, places: list[int]):
        self._dataset = dataset.select(places)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: Any) -> Any:
        return self._dataset[number]["comparison"]

    def __iter__(self) -> Iterator[Any]:
        return comparisons_of(self._dataset)


@dataclass
class Evaluation:
    """Comparisons with the score of each branch, and the rows that could not be scored as (id, reason).

    `ablated[i]` has, by name of the ablation, the scores of the branches of comparison i as it was changed.
    """

    comparisons: Sequence[Comparison] = ()
    scores: list[list[float]] = field(default_factory=list)
    ablated: list[dict[str, list[float]]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _Share:
    """A rank's rows of a data set: every `ranks`-th block of `block`, so that neighbours stay together.

    Rows have their place in the data set as `index` and, where asked for, a near comparison with a fitting other
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
        self._traits: dict[int, Traits | None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        places = [self._places[number] for number in numbers]
        comparisons = self.dataset[places]["comparison"]
        rows = [{"index": place, "comparison": c} for place, c in zip(places, comparisons, strict=True)]
        if self.with_donors:
            first = min(places) // NEAR[-1] * NEAR[-1]  # rows before it are no longer near to any
            self._traits = {place: traits for place, traits in self._traits.items() if place >= first}
            self._traits |= {row["index"]: traits_of(row["comparison"]) for row in rows}
            for row in rows:
                row["donor"] = donor_of(row["comparison"], row["index"], self.dataset, self._traits)
        return rows


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
        VlmrmError: on every rank, when one has a row that it may not skip.
    """
    share: Any = _Share(dataset, batch_size, rank, ranks, with_donors=bool(ablations))
    loader = DataLoader(
        share,
        batch_size=batch_size,
        collate_fn=replace(collator, ablations=ablations or {}),
        num_workers=num_workers,
    )
    scored: list[tuple[int, str | None, list[float]]] = []
    dropped: list[tuple[str, str]] = []
    failed: Exception | None = None
    progress = tqdm(loader, desc=description, unit="batch", leave=False, disable=None if rank == 0 else True)
    try:
        with plain_worker_errors():
            for batch in progress:
                for part in batch["parts"]:
                    scores = model(**to_device(part["inputs"], model.device)).logits.squeeze(-1).float().tolist()
                    scored += scores_by_ablation(part, scores)
                dropped += batch["dropped"]
    except torch.OutOfMemoryError as error:
        failed = torch.OutOfMemoryError(" ".join(str(error).split()))
    except VlmrmError as error:
        failed = error
    # A rank that cannot go on must not leave the others waiting for its scores.
    for failure in gather_object([failed]):
        if failure is not None:
            raise failure
    by_place: dict[int, dict[str | None, list[float]]] = {}
    for place, name, values in gather_object(scored):
        by_place.setdefault(place, {})[name] = values
    places = sorted(by_place)
    result = Evaluation(_Rows(dataset, places), dropped=gather_object(dropped))
    for place in places:
        result.scores.append(by_place[place].pop(None))
        result.ablated.append({name: values for name, values in by_place[place].items() if name is not None})
    return result
