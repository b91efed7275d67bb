"""Strengths of models by a Bradley-Terry model over prompts, with confidence sets for their ranks.

Models are compared pair by pair, on the pairs that both have: who has it right wins, and equal credits are half a win
for each. A prompt counts once, however many pairs it has. P(i better than j) = σ(θi - θj), with the strengths θ that
are likeliest (Bradley and Terry, 1952), so that a model is compared with others on what they have in common alone,
and a set that it lacks neither helps nor harms it.

Ranks: i is ahead of j if their difference is above zero in simultaneous 95 % intervals of all differences, by the
largest of the studentised differences in a bootstrap of prompts. The rank of a model lies between one more than the
number of models ahead of it, and the number of those that it is not ahead of (Mogstad, Romano, Shaikh and Wilhelm,
Inference for Ranks, 2024).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.sparse.csgraph import connected_components
from scipy.special import expit

from vlmrm.measures.intervals import LEVEL, Estimate

DRAWS = 1000  # of the bootstrap
CELLS = 1 << 22  # draws x prompts held at a time: 32 MiB
PRIOR = 0.5  # wins each way that every compared couple begins with, so that no strength is infinite
LARGEST_STEP = 2.0  # of Newton's method
CLOSE = 1e-10


class Standing(NamedTuple):
    """A model among the others.

    `strength` is the probability, from 0 to 1, of being better on a prompt than a model of mean strength, equal ones
    counted as half. `rank` is 1 for the best, and lies from `best_rank` to `worst_rank` with 95 % for all models
    together. Models that share a letter of `group` cannot be told apart.
    """

    strength: Estimate
    rank: int
    best_rank: int
    worst_rank: int
    group: str


def standings(credits: np.ndarray, prompts: Sequence | np.ndarray, weights: np.ndarray) -> list[Standing]:
    """Return the standing of each of M connected models.

    Args:
        credits: 1 for a pair that a model has right, a half for equal scores, 0 for wrong; NaN for one that it lacks
            [N, M].
        prompts: the prompt of each pair [N], the cluster of the bootstrap.
        weights: the part of a prompt that each pair is [N].

    Raises:
        ValueError: when some models have no pair in common with the others, not even by way of third ones.
    """
    size = credits.shape[1]
    if len({*connected(credits)}) > 1:
        raise ValueError("the models are not connected by pairs")
    won = wins(credits, prompts, weights)
    total = won.sum(axis=0)
    prior = PRIOR * (total + total.T > 0)
    strengths = fit(total + prior)
    drawn = np.full((2, size), np.nan)
    if len(won) > 1:
        drawn = fit(resampled(won) + prior)
    ahead = ahead_of(strengths, drawn)
    counts = (~np.isnan(credits)).sum(axis=0)
    of_model = [np.unique(np.asarray(prompts, dtype=object)[~np.isnan(column)]).size for column in credits.T]
    letters = groups(strengths, ahead)
    return [
        Standing(
            Estimate(
                float(expit(strengths[i])),
                *(float(end) for end in np.quantile(expit(drawn[:, i]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])),
                float(expit(drawn[:, i]).std(ddof=1)),
                int(counts[i]),
                of_model[i],
            ),
            1 + int((strengths > strengths[i] + CLOSE).sum()),
            1 + int(ahead[:, i].sum()),
            size - int(ahead[i].sum()),
            letters[i],
        )
        for i in range(size)
    ]


def wins(credits: np.ndarray, prompts: Sequence | np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return how much of each prompt model i wins against model j: credits [N, M] of pairs → [prompts, M, M]."""
    clusters, names = pd.factorize(np.asarray(prompts, dtype=object))
    won = np.zeros((len(names), credits.shape[1], credits.shape[1]))
    for i, first in enumerate(credits.T):
        for j, second in enumerate(credits.T):
            if i != j:
                share = (first > second) + 0.5 * (first == second)  # NaN compares as false
                won[:, i, j] = np.bincount(clusters, share * weights, len(names))
    return won


def resampled(won: np.ndarray) -> np.ndarray:
    """Return the wins in samples of as many prompts, with replacement: [prompts, M, M] → [draws, M, M]."""
    rng, count = np.random.default_rng(0), len(won)
    flat, drawn = won.reshape(count, -1), np.zeros((DRAWS, won[0].size))
    step = max(CELLS // count, 1)
    for start in range(0, DRAWS, step):
        rows = range(start, min(start + step, DRAWS))
        times = [np.bincount(rng.integers(count, size=count), minlength=count) for _ in rows]
        drawn[rows.start : rows.stop] = np.array(times, dtype=np.float64) @ flat
    return drawn.reshape(DRAWS, *won.shape[1:])


def connected(credits: np.ndarray) -> np.ndarray:
    """Return the component of each model: within one, models have pairs in common, if by way of others: [M]."""
    has = (~np.isnan(credits)).astype(np.float64)
    return connected_components(has.T @ has > 0, directed=False)[1]


def fit(wins: np.ndarray) -> np.ndarray:
    """Return the likeliest strengths, with mean zero, of wins of i over j: [..., M, M] → [..., M].

    The likelihood is concave, and Newton's method finds its maximum where each model has won and lost.
    """
    size = wins.shape[-1]
    met = wins + np.swapaxes(wins, -1, -2)
    won = wins.sum(axis=-1)
    strengths = np.zeros(wins.shape[:-1])
    for _ in range(100):
        chance = expit(strengths[..., :, None] - strengths[..., None, :])
        gradient = won - (met * chance).sum(axis=-1)
        information = met * chance * (1 - chance)
        # The Laplacian of the couples; a constant, which changes no chance, is held at zero by the matrix of ones.
        hessian = np.eye(size) * information.sum(axis=-1)[..., None] - information + 1 / size
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        strengths = strengths + np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        if np.abs(step).max(initial=0) < CLOSE:
            break
    return strengths - strengths.mean(axis=-1, keepdims=True)


def ahead_of(strengths: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return whether model i is ahead of model j, by strengths [M] and their bootstrap [draws, M]: bool [M, M].

    With a probability of 95 % no model is ahead of one that is as good.
    """
    difference = strengths[:, None] - strengths[None, :]
    spread = (drawn[:, :, None] - drawn[:, None, :]) - difference
    error = spread.std(axis=0, ddof=1)
    differs = error > CLOSE  # not of models whose credits are the same everywhere
    error = np.where(differs, error, 1.0)
    largest = (np.abs(spread) / error * differs).max(axis=(1, 2), initial=0)
    return differs & (difference / error > np.quantile(largest, LEVEL))


def groups(strengths: np.ndarray, ahead: np.ndarray) -> list[str]:
    """Return the letters of each model: a for the best and those that it is not ahead of, and so on.

    A letter stands for neighbours in the order of strength of which none is ahead of another (Piepho, 2004).
    """
    order = np.argsort(-strengths, kind="stable")
    apart = ahead[np.ix_(order, order)]
    letters, end = [""] * len(order), 0
    number = 0
    for start in range(len(order)):
        stop = start + 1
        while stop < len(order) and not apart[start : stop + 1, stop].any():
            stop += 1
        if stop > end:
            for position in range(start, stop):
                letters[order[position]] += _letter(number)
            end, number = stop, number + 1
    return letters


def _letter(number: int) -> str:
    letters = string.ascii_lowercase
    return letters[number] if number < len(letters) else f"({number + 1})"
