"""The processes of a distributed run, and groups whose samples lie on several of them.

A single process needs neither torch nor accelerate.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from vlmrm.rewards.samples import CallResult, Samples, join

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")


def process_state() -> PartialState | None:
    """Return accelerate's state of this process, which joins it to its launcher's others; None without accelerate."""
    if find_spec("accelerate") is None:
        return None
    from accelerate import PartialState

    return PartialState()


def world_size() -> int:
    """Return how many processes there are; 1 outside a distributed run."""
    # Set by a launcher. Ranks that have not joined its process group yet would each take themselves for the only one.
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        process_state()
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def rank() -> int:
    """Return the number of this process, from 0."""
    if world_size() == 1:
        return 0
    from torch import distributed

    return distributed.get_rank()


def gather(item: T) -> list[T]:
    """Return the `item` of every process, in the order of their ranks. A collective call: every rank makes it."""
    if (size := world_size()) == 1:
        return [item]
    from torch import distributed

    items: list[Any] = [None] * size
    distributed.all_gather_object(items, item)
    return items


def groups_to_compute(samples: Samples, fields: Collection[str]) -> tuple[list[Samples], list[Samples], bool]:
    """Return the groups to compute here: its own, its part of those on several ranks, and if there are such at all.

    A collective call: each group is computed on one rank. Only `fields` of shared groups are sent. Indices of shared
    samples are (rank, index).
    """
    groups = samples.by_group()
    if world_size() == 1:
        return [samples.take(positions) for positions in groups.values()], [], False
    ranks = Counter(group for of_rank in gather(list(groups)) for group in of_rank)
    shared_ids = [group for group, count in ranks.items() if count > 1]
    local = [samples.take(positions) for group, positions in groups.items() if ranks[group] == 1]
    if not shared_ids:
        return local, [], False
    part = samples.take([position for group in shared_ids for position in groups.get(group, ())])
    columns = {name: column for name, column in part.columns.items() if name in fields}
    parts = gather((columns, part.groups, [(rank(), index) for index in part.indices]))
    gathered = join([Samples(*share) for share in parts if share[2]])
    # In turn, so that the work of shared groups is spread over the ranks.
    own_ids = set(shared_ids[rank() :: world_size()])
    shared = [gathered.take(positions) for group, positions in gathered.by_group().items() if group in own_ids]
    return local, shared, True


def exchange_results(shared: CallResult) -> CallResult:
    """Send back the results of shared groups and return those of this rank's samples. A collective call."""
    local, this_rank = CallResult(), rank()
    results: list[Any] = gather(shared)
    for result in results:
        parts = (
            {index: value for (of_rank, index), value in part.items() if of_rank == this_rank}
            for part in (result.rewards, result.failures, result.info)
        )
        local.update(CallResult(*parts))
    return local
