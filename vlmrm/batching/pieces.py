"""Where to cut a comparison that alone is over the token budget: into forwards that compute the least in all.

Each piece computes the prompts and images of its own conversations, so pieces should hold what shares most. In the
order of a batcher neighbours do, and the pieces are runs of that order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

logger = logging.getLogger("vlmrm")

Costs = Callable[[int], Iterator[int]]


def cheapest_runs(count: int, costs: Costs, budget: int, size: Callable[[range], int] | None = None) -> list[range]:
    """Cut 0 to `count` - 1 into runs of at most `budget` with the least total cost; one item alone may be over it.

    Args:
        costs: yields the cost of the run of one item from its argument on, of two items, and so on, never less.
        size: what a run really comes to, where that may be more: a batch repeats prefixes that save too little.
    """
    runs = _cheapest_runs(count, costs, budget)
    if size is not None:
        limit = budget
        while excess := max((max(size(run) - budget, 0) for run in runs if len(run) > 1), default=0):
            limit -= excess
            runs = _cheapest_runs(count, costs, limit)
    return runs


def _cheapest_runs(count: int, costs: Costs, limit: int) -> list[range]:
    # By number of items: the least that they cost in all, the number of runs, and where the last run begins.
    best: list[tuple[float, int, int]] = [(0, 0, 0), *[(float("inf"), 0, 0)] * count]
    for first in range(count):
        before, number, _ = best[first]
        for stop, cost in enumerate(costs(first), first + 1):
            if cost > limit and stop > first + 1:
                break
            best[stop] = min(best[stop], (before + cost, number + 1, first))
    runs: list[range] = []
    stop = count
    while stop:
        runs.append(range(best[stop][2], stop))
        stop = best[stop][2]
    return runs[::-1]


def shared_costs(lengths: Sequence[int], shared: Sequence[int], media: Sequence[Mapping[str, int]]) -> Costs:
    """Return the costs of runs of conversations: common prefixes and media are computed once.

    Args:
        lengths: tokens of each conversation, sorted so that each shares most with the one before it.
        shared: tokens that each has in common with the one before it.
        media: patches of each conversation's media by key.
    """

    def costs(first: int) -> Iterator[int]:
        total, keys = shared[first], set()  # what the first shares is not there
        for length, common, patches in zip(lengths[first:], shared[first:], media[first:], strict=True):
            total += length - common + sum(count for key, count in patches.items() if key not in keys)
            keys |= patches.keys()
            yield total

    return costs


_logged: set[tuple[int | None, bool]] = set()


def log_cut(alone: int, in_pieces: int, budget: int | None, *, trained: bool = False) -> None:
    """Log once a process and budget that comparisons are computed in pieces, and what that costs.

    Args:
        alone, in_pieces: tokens and patches of such comparisons, in one forward each and in their pieces; or 0.
        trained: their gradients are computed, and so their scores twice.
    """
    if alone and (budget, trained) not in _logged:
        _logged.add((budget, trained))
        logger.info(
            "Comparisons that alone are over max_tokens_per_batch (%s) are computed in pieces, with equal results: "
            "%s tokens and patches were %s in one forward%s; raise it where memory allows",
            budget, in_pieces, alone, ", and each is scored once more before its gradient" if trained else "",
        )  # fmt: skip
