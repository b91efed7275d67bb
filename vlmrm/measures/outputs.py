"""Figures of each output of a model from the judgements that train it, and the scale of its scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from vlmrm.conversation import Comparison, agreed_pairs
from vlmrm.measures.intervals import NAN, Correlation, Figure, Lost, Mean
from vlmrm.measures.interventions import INTERVENTIONS, Intervention
from vlmrm.measures.pairs import credits_of
from vlmrm.measures.statistics import fitted_temperature
from vlmrm.outputs import Output, Outputs

RIGHT = 0.5  # from which on a step is right
TOTAL = ""  # the name of the one number among the outputs


class Judged(NamedTuple):
    """What people say of an output, and what it answers, of the answers [B] of all comparisons, in order."""

    values: np.ndarray
    ratings: np.ndarray  # the mean of the raters, NaN where there are none
    pairs: np.ndarray  # [P, 2], the numbers of the better and the worse of two answers
    owners: np.ndarray  # the number of the comparison

    @property
    def margins(self) -> np.ndarray:
        """How far the better answer of each pair is ahead: [P]."""
        return self.values[self.pairs[:, 0]] - self.values[self.pairs[:, 1]]


def judged_outputs(
    outputs: Outputs, comparisons: Sequence[Comparison], values: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, Judged]:
    """Return what is said of each output; `values[i]` has a value a branch by the name of the output."""
    counts = [len(next(iter(of.values()))) for of in values]
    owners, starts = np.repeat(np.arange(len(counts)), counts), np.cumsum([0, *counts])
    sums = {name: np.zeros((2, len(owners))) for name in outputs.names}  # of the raters' values and of their weights
    pairs: dict[str, list[tuple[int, int]]] = {name: [] for name in outputs.names}
    for start, comparison in zip(starts, comparisons, strict=False):
        for number, name in enumerate(outputs.names):
            own = [judgement for judgement in comparison.judgements if outputs.index(judgement) == number]
            rated = [judgement for judgement in own if judgement.kind != "preference"]
            for it in rated:
                sums[name][:, start + np.array(it.answers)] += it.weight * np.array([it.values, [1] * len(it.values)])
            compared = chain(agreed_pairs(rated), *(it.pairs() for it in own if it.kind == "preference"))
            pairs[name] += [(start + it.chosen, start + it.rejected) for it in compared if not it.tie]
    judged = {}
    for name, (totals, weights) in sums.items():
        of_all = np.array([*chain.from_iterable(of[name] for of in values)])
        ratings = np.round(np.divide(totals, weights, out=np.full(len(owners), NAN), where=weights > 0), 9)
        judged[name] = Judged(of_all, ratings, np.array(pairs[name], np.int64).reshape(-1, 2), owners)
    return judged


def output_figures(
    outputs: Outputs, judged: Mapping[str, Judged], clusters: np.ndarray | None = None
) -> dict[str, dict[str, Any]]:
    """Return the figures of each output that is judged, with `clusters` of the comparisons as `Estimate` has them.

    accuracy: share of pairs in the order of the judgement, ties of the model as a half, of `pairs`.
    rank: Spearman's correlation of values and ratings; error: their mean distance; of `ratings`.
    auc: probability that a right step has a higher value than a wrong one; first_wrong: share of the solutions with a
    wrong step of which the first is found, as the first value below a half.
    order: share of the frames of an episode in the order of their progress, two by two.
    """

    def said(figure: Any, comparisons: Any) -> Any:
        if not isinstance(figure, Figure):
            return figure
        return figure.influence().value if clusters is None else figure.estimate(clusters[comparisons])._asdict()

    found = {it.name: {name: said(*of) for name, *of in _figures(it, judged[it.name])} for it in outputs}
    return {name: figures for name, figures in found.items() if figures}


def _figures(output: Output, of: Judged) -> Iterator[tuple[str, Figure | float, np.ndarray]]:
    """Yield the name of each figure, the figure, and the numbers of the comparisons of its rows."""
    credits, owners = Mean(credits_of(of.margins), scale="share"), of.owners[of.pairs[:, 0]]
    if len(owners) and output.kind != "progress":
        yield from (("accuracy", credits, owners), ("pairs", len(owners), owners))
    rated = ~np.isnan(of.ratings)
    if not (output.rates and rated.any()):
        return
    yield "ratings", int(rated.sum()), of.owners
    if output.kind == "correctness":
        yield "auc", _auc(of.ratings[rated] >= RIGHT, of.values[rated]), of.owners
        wrong, first = _firsts(of.owners, rated & (of.ratings < RIGHT))
        found = dict(zip(*_firsts(of.owners, rated & (of.values < RIGHT)), strict=True))
        hits = [float(found.get(owner) == place) for owner, place in zip(wrong, first, strict=True)]
        yield "first_wrong", Mean(np.array(hits), scale="share"), wrong
        return
    yield "error", Mean(np.abs(of.ratings - of.values), scale="positive"), of.owners
    if output.kind == "progress":
        yield "order", credits, owners
    else:
        yield "rank", Correlation(of.ratings, of.values), of.owners


def output_changes(
    outputs: Outputs,
    judged: Mapping[str, Judged],
    altered: Sequence[Mapping[str, Mapping[str, Sequence[float]]]],
    clusters: np.ndarray,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what interventions do to each output that is judged; `altered[i]` has values by intervention and output.

    lost: the part of its rank correlation with ratings, or without any of its accuracy, that is lost on the answers
    that were changed; of pairs an attack changes the worse alone. moved: by how many standard deviations its values
    rise.
    """
    scored = {name for of_row in altered for name in of_row}
    asked = [it for name, it in INTERVENTIONS.items() if name in scored and it.repeats is None]
    return {
        output.name: {it.name: _changed(output, judged[output.name], it, altered, clusters) for it in asked}
        for output in outputs
        if len(judged[output.name].pairs) or not np.isnan(judged[output.name].ratings).all()
    }


def _changed(
    output: Output,
    of: Judged,
    intervention: Intervention,
    altered: Sequence[Mapping[str, Mapping[str, Sequence[float]]]],
    clusters: np.ndarray,
) -> dict[str, Any]:
    values = np.full(len(of.values), NAN)
    for start, row in zip(np.searchsorted(of.owners, np.arange(len(altered))), altered, strict=True):
        if intervention.name in row:
            changed = row[intervention.name][output.name]
            values[start : start + len(changed)] = changed
    moved = Mean((values - of.values) / max(float(of.values.std()), 1e-12)).estimate(clusters[of.owners])
    rated = of.ratings + 0 * values  # of what was changed alone
    if output.rates and not np.isnan(of.ratings).all():
        lost = Lost(Correlation(rated, of.values), Correlation(rated, values)).estimate(clusters[of.owners])
    else:
        better, worse = of.pairs.T
        credits = credits_of((of.values if intervention.attack else values)[better] - values[worse])
        lost = Mean(credits_of(of.margins) - credits, scale="difference").estimate(clusters[of.owners[better]])
    return {"lost": lost._asdict(), "moved": moved._asdict()}


def _firsts(owners: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the comparisons with an answer of `where`, and the first such answer of each."""
    numbers, first = np.unique(owners[where], return_index=True)
    return numbers, np.flatnonzero(where)[first]


def _auc(positive: np.ndarray, values: np.ndarray) -> float:
    above, below = positive.sum(), (~positive).sum()
    if not above or not below:
        return NAN
    return (rankdata(values)[positive].sum() - above * (above + 1) / 2) / (above * below)


# The scale of scores -------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """Scores of reference data, and by how much the better of two answers is ahead, as people say."""

    scores: np.ndarray
    margins: np.ndarray

    @classmethod
    def rated(cls, scores: np.ndarray, ratings: np.ndarray) -> Reference:
        """Return scores[N] with the margins of each answer to one drawn for it, whatever their prompts."""
        rated = np.flatnonzero(~np.isnan(ratings))
        other = np.random.default_rng(0).permutation(rated)
        ahead = np.sign(ratings[rated] - ratings[other])
        return cls(scores, (ahead * (scores[rated] - scores[other]))[ahead != 0])


def references(
    outputs: Outputs, judged: Mapping[str, Judged], scores: Sequence[Sequence[float]], margins: np.ndarray
) -> dict[str, Reference]:
    """Return the reference of the one number, of these `margins` or else of its rating, and of each output."""
    found = {TOTAL: Reference(np.array([*chain.from_iterable(scores)]), margins)}
    if judged and not len(margins):
        weighed = [it.weight * judged[it.name].ratings for it in outputs if it.weight]
        found[TOTAL] = Reference.rated(found[TOTAL].scores, np.sum(weighed, axis=0))
    for name, of in judged.items():
        said = ~np.isnan(of.ratings)
        known = said | np.isin(np.arange(len(said)), of.pairs)
        known = known if known.any() else ~known  # of what nobody judges all answers
        rated = Reference.rated(of.values[known], of.ratings[known])
        found[name] = rated if said.any() else rated._replace(margins=of.margins)
    return found


def scale_of(references: Mapping[str, Reference]) -> dict[str, Any]:
    """Return what a checkpoint carries of its scores on reference data; nothing where all are equal."""
    spread = {name: it for name, it in references.items() if len(it.scores) and np.ptp(it.scores) > 0}
    scales = {name: _scale(it.scores, fitted_temperature(it.margins)) for name, it in spread.items()}
    total = scales.pop(TOTAL, {})
    return {**total, "reward_scales": scales} if scales else total


def _scale(scores: np.ndarray, temperature: float) -> dict[str, Any]:
    return {
        "reward_mean": float(scores.mean()),
        "reward_std": float(scores.std()),
        "reward_count": len(scores),
        "reward_quantiles": np.quantile(scores, np.linspace(0, 1, 101)).tolist(),
        "reward_temperature": temperature if 0 < temperature < np.inf else None,
    }
