"""Strengths of models by a Bradley-Terry model over prompts, with confidence sets for their ranks.

Models are compared pair by pair, on the pairs that both have: who has it right wins, and equal credits are half a win
for each. A prompt counts once, however many pairs it has. P(i better than j) = σ(θi - θj), with the strengths θ that
are likeliest (Bradley and Terry, 1952), so that a model is compared with others on what they have in common alone,
and a set that it lacks neither helps nor harms it.

Ranks: i is ahead of j where the difference of their strengths is above zero in tests of all differences together: by
the largest of the studentised differences when the signs of whole prompts are flipped (Westfall and Young, 1993).
The rank of a model lies between one more than the number of models ahead of it, and the number of those that it is
not ahead of (Mogstad, Romano, Shaikh and Wilhelm, Inference for Ranks, 2024).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.sparse.csgraph import connected_components
from scipy.special import expit
from scipy.stats import t

from vlmrm.measures.differences import chance_of_largest
from vlmrm.measures.intervals import LEVEL, Estimate

PRIOR = 0.5  # wins each way that every compared couple begins with, so that no strength is infinite
MOST = 1000.0  # of a studentised difference, which is infinite where all prompts say the same
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


class Influences(NamedTuple):
    """How each prompt moves each strength [prompts, M]: `of_fit` adds up to zero, `of_strength` to the strength."""

    of_fit: np.ndarray
    of_strength: np.ndarray


def standings(credits: np.ndarray, prompts: Sequence | np.ndarray, weights: np.ndarray) -> list[Standing]:
    """Return the standing of each of M connected models.

    Args:
        credits: 1 for a pair that a model has right, a half for equal scores, 0 for wrong; NaN for one that it lacks
            [N, M].
        prompts: the prompt of each pair [N].
        weights: the part of a prompt that each pair is [N].

    Raises:
        ValueError: when some models have no pair in common with the others, not even by way of third ones.
    """
    size = credits.shape[1]
    if len({*connected(credits)}) > 1:
        raise ValueError("the models are not connected by pairs")
    won = wins(credits, prompts, weights)
    total = won.sum(axis=0)
    strengths = fit(total + PRIOR * (total + total.T > 0))
    influences = influences_on(strengths, won)
    errors = np.sqrt((influences.of_fit**2).sum(axis=0) * len(won) / max(len(won) - 1, 1))
    half = errors * (t.ppf((1 + LEVEL) / 2, len(won) - 1) if len(won) > 1 else np.nan)
    ahead = ahead_of(influences.of_strength)
    letters = groups(strengths, ahead)
    return [
        Standing(
            Estimate(
                *(float(expit(strengths[i] + by)) for by in (0, -half[i], half[i])),
                float(errors[i] * expit(strengths[i]) * expit(-strengths[i])) if len(won) > 1 else float("nan"),
                int((~np.isnan(credits[:, i])).sum()),
                int(pd.Series(prompts)[~np.isnan(credits[:, i])].nunique()),
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
    codes, names = pd.factorize(np.asarray(prompts, dtype=object))
    won = np.zeros((len(names), credits.shape[1], credits.shape[1]))
    for i, first in enumerate(credits.T):
        for j, second in enumerate(credits.T):
            if i != j:
                share = (first > second) + 0.5 * (first == second)  # NaN compares as false
                won[:, i, j] = np.bincount(codes, share * weights, len(names))
    return won


def connected(credits: np.ndarray) -> np.ndarray:
    """Return the component of each model: within one, models have pairs in common, if by way of others: [M]."""
    has = (~np.isnan(credits)).astype(np.float64)
    return connected_components(has.T @ has > 0, directed=False)[1]


def fit(wins: np.ndarray) -> np.ndarray:
    """Return the likeliest strengths, with mean zero, of wins [M, M] of i over j: [M].

    The likelihood is concave, and Newton's method finds its maximum where each model has won and lost.
    """
    strengths = np.zeros(len(wins))
    met = wins + wins.T
    for _ in range(100):
        chance = expit(strengths[:, None] - strengths)
        step = np.linalg.solve(_information(met, chance), (wins - met * chance).sum(axis=1))
        strengths = strengths + np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        if np.abs(step).max() < CLOSE:
            break
    return strengths - strengths.mean()


def _information(met: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Return the information of the strengths [M, M]; their mean, which changes no chance, is held by the ones."""
    couples = met * chance * (1 - chance)
    return np.diag(couples.sum(axis=1)) - couples + 1 / len(met)


def influences_on(strengths: np.ndarray, won: np.ndarray) -> Influences:
    """Return how much each prompt moves the strengths [M] of wins [prompts, M, M], to first order."""
    difference = strengths[:, None] - strengths
    chance = expit(difference)
    met = won + won.transpose(0, 2, 1)
    inverse = np.linalg.inv(_information(met.sum(axis=0), chance))
    gradient = (won - met * chance).sum(axis=2)
    share = (met * (chance * (1 - chance) * difference)).sum(axis=2)
    return Influences(gradient @ inverse, (gradient + share) @ inverse)


def ahead_of(influences: np.ndarray) -> np.ndarray:
    """Return whether model i is ahead of model j: influences on the strengths [prompts, M] → bool [M, M].

    With a probability of 95 % no model is ahead of one that is as good.
    """
    first, second = np.triu_indices(influences.shape[1], k=1)
    differences = influences[:, first] - influences[:, second]
    differences[:, np.abs(differences).max(axis=0) < CLOSE] = 0  # of models that are the same
    chance = chance_of_largest(differences, np.arange(len(influences)))
    ahead = np.zeros((influences.shape[1],) * 2, dtype=bool)
    if len(chance):
        least = np.quantile(np.minimum(chance, MOST), LEVEL)
        means, errors = differences.mean(axis=0), differences.std(axis=0, ddof=1) / np.sqrt(len(differences))
        bounds = least * np.maximum(errors, np.abs(means) / MOST)
        ahead[first, second], ahead[second, first] = means > bounds, -means > bounds
    return ahead


def groups(strengths: np.ndarray, ahead: np.ndarray) -> list[str]:
    """Return the letters of each model: a for the best and those that it is not ahead of, and so on.

    A letter stands for neighbours in the order of strength of which none is ahead of another (Piepho, 2004).
    """
    order = np.argsort(-strengths, kind="stable")
    apart = ahead[np.ix_(order, order)]
    letters, end, number = [""] * len(order), 0, 0
    for start in range(len(order)):
        stop = start + 1
        while stop < len(order) and not apart[start:stop, stop].any():
            stop += 1
        if stop > end:
            for position in range(start, stop):
                letters[order[position]] += _letter(number)
            end, number = stop, number + 1
    return letters


def _letter(number: int) -> str:
    letters = string.ascii_lowercase
    return letters[number] if number < len(letters) else f"({number + 1})"
