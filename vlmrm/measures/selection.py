"""The figure of the best of several checkpoints without the luck of being chosen.

The best of many equal checkpoints is the one that chance helped most, and its figure on the pairs that chose it is too
high. Here prompts are drawn with replacement; in each draw the choice is made anew, and the chosen one is measured on
the prompts that were not drawn (Tsamardinos, Greasidou and Borboudakis, Bootstrapping the out-of-sample predictions,
2018). The mean over draws has no luck in it; since a draw holds fewer prompts, it is a little below the truth where
checkpoints do differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from vlmrm.measures.intervals import Estimate, Figure, numbered, spread, with_ends

DRAWS, SEED = 400, 0
CELLS = 1 << 22  # draws x prompts held at a time


def contributions(figure: Figure, prompt_ids: Sequence | np.ndarray) -> pd.Series:
    """Return what each prompt adds: values whose mean is the figure, to first order those of leaving one out."""
    influence = figure.influence()
    codes, names = pd.factorize(np.asarray(prompt_ids, dtype=object))
    by_prompt = np.bincount(codes, influence.rows, len(names))
    counted = np.bincount(codes, influence.shares, len(names)) > 0
    return pd.Series(influence.value + counted.sum() * by_prompt[counted], index=names[counted])


def without_luck(
    chosen: tuple[Figure, np.ndarray],
    measured: Sequence[pd.Series],
    choose: Callable[[np.ndarray], int],
    by: Sequence[pd.Series] | None = None,
) -> Estimate | None:
    """Return the figure of the chosen one of M checkpoints without the luck of the choice.

    Args:
        chosen: the figure of the checkpoint that was chosen, and its rows' prompts.
        measured: the `contributions` to the figure that is reported, of each checkpoint.
        choose: the number of the chosen checkpoint for values [M] of the figure to choose by.
        by: the contributions to that figure, where it is another one.

    Returns:
        The estimate, None where fewer than two prompts are common to all.
    """
    figure, prompt_ids = chosen
    influence = figure.influence()
    of, count = spread(influence, numbered(prompt_ids))
    reported, deciding = (pd.concat(list(columns), axis=1, join="inner") for columns in (measured, by or measured))
    shared = reported.index.intersection(deciding.index)
    if len(shared) < 2:
        return None
    values, choosing = reported.loc[shared].to_numpy(), deciding.loc[shared].to_numpy()
    size = len(shared)
    rng = np.random.default_rng(SEED)
    total, draws = np.zeros(size), np.zeros(size)
    step = max(CELLS // size, 1)
    for start in range(0, DRAWS, step):
        times = np.stack(
            [
                np.bincount(rng.integers(size, size=size), minlength=size)
                for _ in range(start, min(start + step, DRAWS))
            ]
        )
        picks = [choose(row) for row in times @ choosing / size]
        left_out = times == 0
        total += (left_out * values[:, picks].T).sum(axis=0)
        draws += left_out.sum(axis=0)
    value = float(np.mean(total[draws > 0] / draws[draws > 0]))
    return with_ends(influence._replace(value=value), of, count, figure.on)
