"""Tournaments: which pairs of a group to compare, and the strengths that explain who won."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np

Pair = tuple[int, int]
Credits = dict[Pair, float]  # of the first of each pair, 0 to 1

PRIOR = 0.1  # weight of the prior by which strengths are finite, beside one comparison each
STEPS = 50


def play(count: int, rounds: int, compare: Callable[[Sequence[Pair]], Mapping[Pair, float]]) -> Credits:
    """Return the credits of a Swiss tournament of `rounds` rounds, or of all pairs where as many rounds hold them.

    In each round everyone meets someone of about the same strength whom he has not met, but the one who is left over.
    `compare` returns the credits of pairs that could be compared.
    """
    if full_rounds(count) <= rounds:
        return dict(compare(list(combinations(range(count), 2))))
    credits: Credits = {}
    met: set[Pair] = set()
    for _ in range(rounds):
        pairs = _next_pairs(strengths(count, credits), met)
        met.update(pairs)
        credits.update(compare(pairs))
    return credits


def full_rounds(count: int) -> int:
    """Return the rounds of a tournament in which all meet."""
    return count - 1 + count % 2


def _next_pairs(values: np.ndarray, met: set[Pair]) -> list[Pair]:
    """Return new pairs of neighbours in strength, each in the order of the group.

    Of an odd number one of those who met most rests, the weakest of them. In groups hardly larger than the rounds some
    may find nobody new.
    """
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if len(order) % 2:
        meetings = np.bincount(np.array(sorted(met), dtype=int).reshape(-1), minlength=len(order))
        order.remove(max(reversed(order), key=lambda i: meetings[i]))
    pairs: list[Pair] = []
    left: list[int] = []
    while order:
        first = order.pop(0)
        second = next((other for other in order if _pair(first, other) not in met), None)
        if second is None:
            left.append(first)
        else:
            order.remove(second)
            pairs.append(_pair(first, second))
    while len(left) > 1:  # they have met: each takes one of a pair, the weakest that allows it
        one, other = left.pop(), left.pop()
        for number, (first, second) in reversed(list(enumerate(pairs))):
            new = [[(one, first), (other, second)], [(one, second), (other, first)]]
            allowed = [swap for swap in new if not met & {_pair(*pair) for pair in swap}]
            if allowed:
                pairs[number : number + 1] = [_pair(*pair) for pair in allowed[0]]
                break
    return pairs


def _pair(first: int, second: int) -> Pair:
    return (first, second) if first < second else (second, first)


def strengths(count: int, credits: Mapping[Pair, float]) -> np.ndarray:
    """Return the strengths θ[count] of the Bradley-Terry model P(i beats j) = σ(θi - θj), by Newton's method."""
    values = np.zeros(count)
    if not credits:
        return values
    first, second = np.array(list(credits)).T
    won = np.array(list(credits.values()))
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(values[second] - values[first]))
        slope = -PRIOR * values
        np.add.at(slope, first, won - chance)
        np.add.at(slope, second, chance - won)
        curve = np.eye(count) * PRIOR
        spread = chance * (1 - chance)
        for i, j, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            np.add.at(curve, (i, j), sign * spread)
        step = np.linalg.solve(curve, slope)
        values += step * min(1.0, 2.0 / max(1e-12, float(np.abs(step).max())))  # far steps overshoot
        if np.abs(step).max() < 1e-9:
            break
    return values


def win_rates(values: np.ndarray) -> np.ndarray:
    """Return the chance of each to beat another of the group: [N] in [0, 1]."""
    chances = 1 / (1 + np.exp(values[None, :] - values[:, None]))
    return (chances.sum(axis=1) - 0.5) / max(1, len(values) - 1)
