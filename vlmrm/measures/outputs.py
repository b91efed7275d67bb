"""Figures of each output of a model, from the judgements that train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.stats import rankdata

from vlmrm.conversation import Comparison, Judgement, agreed_pairs
from vlmrm.outputs import Output, Outputs

RIGHT = 0.5  # from which on a step is right


def output_figures(
    outputs: Outputs, comparisons: Sequence[Comparison], values: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, dict[str, float]]:
    """Return the figures of each output that is judged; `values[i]` has a value a branch by the name of the output.

    accuracy: share of pairs in the order of the judgement, ties of the model as a half, of `pairs`.
    rank: Spearman's correlation of values and ratings; error: their mean distance; of `ratings`.
    auc: probability that a right step has a higher value than a wrong one; first_wrong: share of the solutions with a
    wrong step of which the first is found, as the first value below a half.
    order: share of the frames of an episode in the order of their progress, two by two.
    """
    figures = {}
    for number, output in enumerate(outputs):
        judged = [
            (judgement, np.array(of[output.name])[list(judgement.answers)])
            for comparison, of in zip(comparisons, values, strict=True)
            for judgement in _merged(comparison, outputs, number)
        ]
        if judged:
            figures[output.name] = {name: float(value) for name, value in _figures(output, judged)}
    return figures


def _merged(comparison: Comparison, outputs: Outputs, number: int) -> Iterator[Judgement]:
    """Yield what a comparison's raters say of an output: of pairs each, and of ratings their mean."""
    own = [judgement for judgement in comparison.judgements if outputs.index(judgement) == number]
    rated = [judgement for judgement in own if judgement.kind != "preference"]
    if rated:
        answers = sorted({answer for judgement in rated for answer in judgement.answers})
        means = [
            np.average([j.values[j.answers.index(answer)] for j in of], weights=[j.weight for j in of])
            for answer in answers
            if (of := [judgement for judgement in rated if answer in judgement.answers])
        ]
        yield Judgement(tuple(answers), tuple(map(float, means)), rated[0].kind, dimension=rated[0].dimension)
    yield from (judgement for judgement in own if judgement.kind == "preference")


def _figures(output: Output, judged: Sequence[tuple[Judgement, np.ndarray]]) -> Iterator[tuple[str, float]]:
    credits = [credit for judgement, values in judged for credit in _credits(judgement, values)]
    if credits and output.kind != "progress":
        yield from (("accuracy", float(np.mean(credits))), ("pairs", len(credits)))
    rated = [(np.array(judgement.values), values) for judgement, values in judged if judgement.kind != "preference"]
    if not (output.rates and rated):
        return
    truth, values = (np.concatenate(side) for side in zip(*rated, strict=True))
    yield "ratings", len(truth)
    if output.kind == "correctness":
        yield "auc", _auc(truth >= RIGHT, values)
        wrong = [(right < RIGHT, of < RIGHT) for right, of in rated if (right < RIGHT).any()]
        found = [guess.any() and guess.argmax() == right.argmax() for right, guess in wrong]
        yield "first_wrong", np.mean(found) if found else np.nan
    else:
        yield "error", np.abs(truth - values).mean()
        if output.kind == "progress":
            yield "order", float(np.mean(credits))
        else:
            yield "rank", _spearman(truth, values)


def _credits(judgement: Judgement, values: np.ndarray) -> list[float]:
    """Return for each pair that is no tie 1 where the better has the higher value, a half where both are equal."""
    place = dict(zip(judgement.answers, values, strict=True))
    leads = [place[chosen] - place[rejected] for chosen, rejected, tie in agreed_pairs([judgement]) if not tie]
    return [1.0 if lead > 0 else 0.5 * (lead == 0) for lead in leads]


def _auc(positive: np.ndarray, values: np.ndarray) -> float:
    above, below = positive.sum(), (~positive).sum()
    if not above or not below:
        return float("nan")
    return (rankdata(values)[positive].sum() - above * (above + 1) / 2) / (above * below)


def _spearman(truth: np.ndarray, values: np.ndarray) -> float:
    if np.ptp(truth) == 0 or np.ptp(values) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(truth), rankdata(values))[0, 1])
