"""Groups whose samples lie on several ranks: each is computed on one, and its rewards go back to where they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from accelerate import PartialState
from accelerate.utils import gather_object

from vlmrm.rewards.calling import Answer
from vlmrm.rewards.samples import Samples


@dataclass(frozen=True)
class Groups:
    """The groups to be computed here: `whole` ones of this rank, and `shared` ones, whose places are (rank, place).

    `exchanged` says whether any rank has shared ones, on all ranks alike.
    """

    whole: list[Samples]
    shared: list[Samples]
    exchanged: bool


def groups_to_compute(samples: Samples, fields: Collection[str]) -> Groups:
    """This rank's part of the groups of all ranks. A collective call. Only `fields` of shared groups travel."""
    state = PartialState()
    if state.num_processes == 1:
        return Groups([samples.take(numbers) for numbers in samples.grouped().values()], [], False)
    ranks = Counter(group for of_rank in gather_object([list(samples.grouped())]) for group in of_rank)
    shared_ids = [group for group, count in ranks.items() if count > 1]
    whole = [samples.take(numbers) for group, numbers in samples.grouped().items() if ranks[group] == 1]
    if not shared_ids:
        return Groups(whole, [], False)
    everyones = _gathered(samples, set(shared_ids), fields, state.process_index)
    mine = set(shared_ids[state.process_index :: state.num_processes])
    shared = [everyones.take(numbers) for group, numbers in everyones.grouped().items() if group in mine]
    return Groups(whole, shared, True)


def answers_sent_back(answer: Answer) -> Answer:
    """What other ranks found about this rank's samples, for what this one found about theirs. A collective call."""
    rank, mine = PartialState().process_index, Answer()
    for other in gather_object([answer]):
        mine.update(
            Answer(
                *(
                    {place: value for (of_rank, place), value in kind.items() if of_rank == rank}
                    for kind in (other.rewards, other.failures, other.info)
                )
            )
        )
    return mine


def _gathered(samples: Samples, ids: set[Hashable], fields: Collection[str], rank: int) -> Samples:
    """The samples of all ranks that are of these groups."""
    numbers = [number for number, group in enumerate(samples.groups or ()) if group in ids]
    part = samples.take(numbers)
    columns = {name: column for name, column in part.columns.items() if name in fields}
    parts = gather_object([(columns, part.groups, [(rank, place) for place in part.places])])
    return joined([Samples(*each) for each in parts if each[2]])


def joined(parts: Sequence[Samples]) -> Samples:
    """Samples one after another; a column that some do not have is None there."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: [v for part in parts for v in part.columns.get(name, [None] * len(part))] for name in names}
    groups = None
    if all(part.groups is not None for part in parts):
        groups = [group for part in parts for group in part.groups or ()]
    return Samples(columns, groups, [place for part in parts for place in part.places])
