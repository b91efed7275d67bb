"""How many pairs show how small a difference, and what difference a set of pairs could have shown.

Tests are two-sided at 5 %. Pairs of one prompt tell less than as many of their own: n pairs with m a prompt and a
correlation ρ within prompts are worth n / (1 + (m - 1) ρ) (Kish, Survey Sampling, 1965).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import ndtri

from vlmrm.errors import ConfigError
from vlmrm.measures.differences import right_of_shared_pairs
from vlmrm.measures.intervals import Mean, spread
from vlmrm.measures.pairs import read_pairs

LEVEL = 0.05


@dataclass(frozen=True)
class Design:
    """A comparison of a model with a fixed accuracy, or of two models on the same pairs.

    Attributes:
        discordance: the share of pairs that only one of two models has right.
        threshold: the accuracy to be compared with, None for two models.
        pairs_per_prompt: how many pairs a prompt has.
        correlation: of what is compared, between pairs of one prompt.
        power: the probability with which a difference should be found.

    Raises:
        ConfigError: for a share that is none.
    """

    discordance: float = 0.2
    threshold: float | None = None
    pairs_per_prompt: float = 1.0
    correlation: float = 0.0
    power: float = 0.8

    def __post_init__(self):
        shares = {"discordance": self.discordance, "power": self.power}
        shares |= {} if self.threshold is None else {"threshold": self.threshold}
        for name, share in shares.items():
            if not 0 < share < 1:
                raise ConfigError(f"{name} is {share:g}: it is a share between 0 and 1, such as 0.8.")
        if not 0 <= self.correlation <= 1:
            raise ConfigError(f"correlation is {self.correlation:g}: it lies between 0 and 1.")
        if self.pairs_per_prompt < 1:
            raise ConfigError(f"pairs_per_prompt is {self.pairs_per_prompt:g}: a prompt has at least one pair.")

    @property
    def largest(self) -> float:
        """Return the largest difference that there can be."""
        return self.discordance if self.threshold is None else 1 - self.threshold

    @property
    def effect(self) -> float:
        """Return how many pairs tell as much as one of a prompt of its own."""
        return 1 + (self.pairs_per_prompt - 1) * self.correlation

    def pairs(self, difference: float) -> int:
        """Return how many pairs show a difference.

        Of two models the formula is that for paired proportions (Connor, Sample size for testing differences in
        proportions for the paired-sample design, 1987), of one that for a proportion.

        Raises:
            ConfigError: for a difference that cannot be.
        """
        if not 0 < difference < self.largest:
            raise ConfigError(
                f"a difference of {difference:g} is impossible: it lies between 0 and {self.largest:g}, the "
                + ("discordance." if self.threshold is None else "distance from the threshold to 1.")
            )
        return math.ceil(self._pairs(difference))

    def detectable(self, pairs: float) -> float:
        """Return the smallest difference that so many pairs show; NaN where they show none."""
        smallest, largest = 1e-6, self.largest * (1 - 1e-9)
        if pairs <= 0 or self._pairs(largest) > pairs:
            return math.nan
        return float(brentq(lambda difference: math.log(self._pairs(difference) / pairs), smallest, largest))

    def _pairs(self, difference: float) -> float:
        if self.threshold is None:
            without, with_it = self.discordance, self.discordance - difference**2
        else:
            reached = self.threshold + difference
            without, with_it = self.threshold * (1 - self.threshold), reached * (1 - reached)
        root = ndtri(1 - LEVEL / 2) * math.sqrt(without) + ndtri(self.power) * math.sqrt(max(with_it, 0))
        return float(root**2 / difference**2 * self.effect)


def design_of(parts: Sequence[pd.DataFrame], design: Design) -> tuple[Design, int]:
    """Return a design with what scored pairs show of themselves, and the number of their pairs.

    Of several checkpoints these are the two most accurate ones. With a threshold, or of one, `discordance` stays.
    """
    right, prompts = right_of_shared_pairs({str(i): part for i, part in enumerate(parts)})
    order = np.argsort(-right.mean(axis=0), kind="stable")
    values = right[:, order[0]]
    if design.threshold is None and len(parts) > 1:
        values = values - right[:, order[1]]
        design = replace(design, discordance=float(np.clip(np.abs(values).mean(), 1e-3, 1 - 1e-3)))
    sizes = np.bincount(prompts)
    per_prompt = float((sizes**2).sum() / sizes.sum())
    influence = Mean(values).influence()
    alone = float((influence.rows**2).sum())
    error = spread(influence, prompts)[0].error
    effect = error**2 / alone if alone else 1.0
    correlation = float(np.clip((effect - 1) / (per_prompt - 1), 0, 1)) if per_prompt > 1 and effect > 1 else 0.0
    return replace(design, pairs_per_prompt=per_prompt, correlation=correlation), len(right)


def plan(results: Path | None, difference: float | None, pairs: int | None, options: Mapping[str, float]) -> str:
    """Return in words how many pairs a difference needs, or what difference some pairs show.

    Args:
        results: results of a sweep from which the fields of the design that are not among `options` are estimated.

    Raises:
        ConfigError: without anything to plan, or for a value that is impossible.
        DataError: when the results cannot be read.
    """
    if difference is not None and pairs is not None:
        raise ConfigError("difference and pairs say the same twice: give one, and the other follows.")
    design = Design(**options)
    if results is not None:
        file = results if results.suffix == ".parquet" else results.with_suffix(".scores.parquet")
        if not file.is_file():
            raise ConfigError(f"there is no {file}: give the output_file of an evaluation, or its .scores.parquet.")
        frame = read_pairs(file)
        names = [name for name in ("model", "checkpoint") if name in frame]
        parts = [part for _, part in frame.groupby(names, sort=False)] if names else [frame]
        design, held = design_of(parts, design)
        design = replace(design, **options)
        pairs = held if difference is None and pairs is None else pairs
    if difference is None and pairs is None:
        raise ConfigError("there is nothing to plan: give difference, pairs, or the results of an evaluation.")
    condition = (
        f"between two models that disagree in {design.discordance:.1%} of pairs"
        if design.threshold is None
        else f"from an accuracy of {design.threshold:.1%}"
    )
    if difference is not None:
        pairs = design.pairs(difference)
        sentence = f"A difference of {100 * difference:.1f} points {condition} needs {pairs:,} pairs"
    else:
        assert pairs is not None
        smallest = design.detectable(pairs)
        if math.isnan(smallest):
            return f"{pairs:,} pairs are too few to show any difference {condition}: take more."
        sentence = f"{pairs:,} pairs show a difference of {100 * smallest:.1f} points {condition}"
    prompts = math.ceil(pairs / design.pairs_per_prompt)
    return (
        f"{sentence} ({prompts:,} prompts, {design.pairs_per_prompt:.1f} pairs each, correlated by "
        f"{design.correlation:.2f}), found with a probability of {design.power:.0%}."
    )
