"""All metrics of one checkpoint's scored pairs: overall, by category, by any column, and the audit.

The audit says what a preference rests on, decided by equivalence tests for all questions together. A question is an
intervention with its repeats, whose credits are averaged, as are those of the row's own images and of the same ones in
other files: the noise of a scorer that any change of an image shakes is then no loss. Of a judge its two orders are
one question too. What differs between
pairs as they are accuses nobody: where the better answer is longer, it may be easier to tell as well. Two claims can
be made: *reliant*, that accuracy changes by more than a margin, and *not reliant*, that it changes by less (two
one-sided tests, Schuirmann 1987). What neither test shows is *undecided*: that no loss is seen is no proof that there
is none. Only one of both claims can be wrong, and Holm's procedure over all questions, those of categories among them,
keeps the probability that any of them is wrong to 5 %; the questions that decide have the larger shares of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from vlmrm.errors import ConfigError
from vlmrm.measures.intervals import NAN, Estimate, Figure, Mean, spread, with_both_signs, with_ends
from vlmrm.measures.interventions import INTERVENTIONS, SAME, Intervention
from vlmrm.measures.metrics import METRICS
from vlmrm.measures.pairs import PairArrays, check_pairs, credits_of

GROUP = "by/"
MARGIN = 0.05  # of accuracy: a larger change counts, a smaller one counts as none
CLUSTERS = 20  # with fewer, no claim is made
LEVEL, POWER = 0.05, 0.8
CHANCE = 0.5
FURTHER = 0.1  # the share in the risk of a question that does not decide, beside one that does

State = Literal["reliant", "not reliant", "undecided"]


class Finding(NamedTuple):
    """The answer to one question.

    `loss` is the accuracy that is lost, below zero gained; of the order it is what standing first is worth.
    """

    name: str  # of the intervention
    family: str
    state: State
    loss: Estimate
    left: Estimate  # the accuracy under the change
    margin: float
    p_value: float  # of the nearer claim, adjusted for all questions
    detectable: float  # the loss that would have been found with a probability of 80 %, NaN where none
    reason: str  # what is in the way of a claim
    averaged: int  # of how many variants, such as donors or neutral pictures, the figures are the mean
    category: str = ""  # of the rows that it is about, empty for all


def audit(frame: pd.DataFrame) -> list[Finding]:
    """Return a finding for each question that the scored pairs of one checkpoint allow, in their declared order."""
    pairs = PairArrays(frame)
    found = [it for name in INTERVENTIONS if (it := _of_intervention(pairs, name)) is not None]
    decide = [it.name for it, _ in found if INTERVENTIONS[it.name].decides and it.family != "prompt"]
    weights = [1.0 if it.name in decide or not decide else FURTHER for it, _ in found]
    for name in decide:
        if INTERVENTIONS[name].family == "image":
            within = _by_category(frame, name)
            found, weights = found + within, weights + [FURTHER / len(within) for _ in within]
    weights = [0.0 if finding.reason else weight for (finding, _), weight in zip(found, weights, strict=True)]
    adjusted = holm([finding.p_value for finding, _ in found], weights)
    shares = (weight / max(sum(weights), weight or 1.0) for weight in weights)
    return [_answer(*question, p, share) for question, p, share in zip(found, adjusted, shares, strict=True)]


def _by_category(frame: pd.DataFrame, name: str) -> list[Question]:
    """Return an intervention's question for each category of enough clusters, of two or more."""
    parts = frame.groupby("category", observed=True) if "category" in frame else ()
    large = [(str(value), rows) for value, rows in parts if rows["cluster"].nunique() >= CLUSTERS]
    asked = ((value, _of_intervention(PairArrays(rows), name)) for value, rows in large if len(large) > 1)
    return [(it[0]._replace(category=value), it[1]) for value, it in asked if it is not None and not it[0].reason]


def holm(p_values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Return p-values adjusted by Holm's procedure (1979), with weights, in their order."""
    p = np.asarray(p_values, dtype=np.float64)
    w = np.ones(len(p)) if weights is None else np.asarray(weights, dtype=np.float64)
    each = p / np.maximum(w, 1e-9)
    order = np.argsort(each, kind="stable")
    stepped = np.maximum.accumulate(each[order] * w[order][::-1].cumsum()[::-1])
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


def deciding(findings: Sequence[Finding], family: str) -> Finding | None:
    """Return the finding that speaks for a family of which a part is gone, None where it was not asked.

    What takes the place of a part in another row decides, since a model may know nothing like an empty one: grey
    pictures may only be strange to it.
    """
    of_family = [finding for finding in findings if finding.family == family]
    exchanged = [finding for finding in of_family if INTERVENTIONS[finding.name].decides]
    if exchanged or not of_family:
        return next(iter(exchanged), None)
    return of_family[0]


Question = tuple[Finding, "_Test"]  # a claim with its own p-value, before all are taken together


def _answer(finding: Finding, test: _Test, adjusted: float, share: float) -> Finding:
    detectable = NAN
    if test.freedom and share:
        needed = stdtrit(test.freedom, 1 - LEVEL * share) + stdtrit(test.freedom, POWER)
        detectable = float(finding.margin + needed * test.error)
    return finding._replace(
        state="undecided" if finding.reason or adjusted > LEVEL else finding.state,
        p_value=NAN if finding.reason else adjusted,
        detectable=detectable if detectable <= 1 else NAN,
    )


def _of_intervention(pairs: PairArrays, name: str) -> Question | None:
    """Return the question of an intervention; None for a repeat, and where it was not scored."""
    intervention = INTERVENTIONS[name]
    if intervention.repeats is not None:
        return None
    if intervention.family == "order" and not np.isnan(pairs.positions).all():
        return _of_both_orders(pairs, name)
    names = [name, *(repeat for repeat, declared in INTERVENTIONS.items() if declared.repeats == name)]
    altered = [credits_of(pairs.altered_margins(variant)) for variant in names if f"{variant}_chosen" in pairs.frame]
    altered = [credits for credits in altered if not np.isnan(credits).all()]
    if not altered:
        return None
    mean, own = mean_of(altered), _own_credits(pairs, intervention)
    change = own - mean
    if intervention.family == "order":  # what standing first is worth, wherever the chosen answer stands
        chosen, rejected = pairs.sides("branch").T
        change = np.where(chosen < rejected, change, -change)
    test = _test(Mean(change, scale="difference"), pairs.clusters, MARGIN, gain_counts=not intervention.attack)
    p, reason = test.p, ""
    if intervention.family == "image" and not intervention.decides and _has_texts(pairs):
        reason = "A neutral picture may only be strange to it: other rows' images tell, where the data have some."
    elif test.claim == "not reliant" and not intervention.attack:
        # A model that is right as often as chance has nothing to lose.
        above = _test(Mean(np.where(np.isnan(mean), np.nan, own - CHANCE)), pairs.clusters, MARGIN)
        p = max(p, above.p if above.centre > 0 and above.claim == "reliant" else 1.0)
    one_question = "prompt_text" in pairs.frame and pairs.frame["prompt_text"][~np.isnan(mean)].nunique() == 1
    if intervention.family == "question" and not intervention.decides and one_question:
        reason = "All rows ask the same question, so that these data cannot tell; those of several would."
    of_loss = test.estimate
    left = Mean(np.where(np.isnan(pairs.credits), np.nan, mean), scale="share").estimate(pairs.clusters)
    found = Finding(
        name, intervention.family, test.claim, of_loss, left, MARGIN, p, NAN, _too_few(of_loss) or reason, len(altered)
    )
    return found, test


def _own_credits(pairs: PairArrays, intervention: Intervention) -> np.ndarray:
    """Return the credits [N] that those under the intervention are held against."""
    if intervention.family != "image" or not intervention.decides or f"{SAME}_chosen" not in pairs.frame:
        return pairs.credits
    return mean_of([pairs.credits, credits_of(pairs.altered_margins(SAME))])


def mean_of(credits: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of the credits [N] that are there, NaN where none is."""
    stacked = np.stack(credits)
    counts = (~np.isnan(stacked)).sum(axis=0)
    return np.divide(np.nansum(stacked, axis=0), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def _of_both_orders(pairs: PairArrays, name: str) -> Question:
    """Return what standing first is worth to a judge, whose verdict is the mean of both orders."""
    first, second = pairs.positions.T
    test = _test(Mean(first - second, scale="difference"), pairs.clusters, MARGIN)
    left = Mean(second, scale="share").estimate(pairs.clusters)
    return Finding(
        name, "order", test.claim, test.estimate, left, MARGIN, test.p, NAN, _too_few(test.estimate), 1
    ), test


def _too_few(of: Estimate) -> str:
    return f"{of.clusters} clusters are too few to tell." if of.clusters < CLUSTERS else ""


class _Test(NamedTuple):
    claim: State
    p: float
    centre: float
    error: float
    freedom: float
    estimate: Estimate


def _test(figure: Figure, clusters: np.ndarray, margin: float, *, gain_counts: bool = True) -> _Test:
    """Test whether a mean difference is beyond ±margin, or within; `p` is that of the nearer claim.

    Where a gain does not count, anything below the margin is within: who punishes a decoration does no wrong.
    """
    influence = figure.influence()
    of, count = spread(influence, clusters)
    change = with_ends(influence, of, count, "difference")
    if not of.freedom:
        return _Test("not reliant", 1.0, influence.value, NAN, 0, change)
    centre, error = with_both_signs(influence.value, of)
    beyond = (abs(centre) if gain_counts else centre) - margin
    p = float(stdtr(of.freedom, -abs(beyond) / error))
    return _Test("reliant" if beyond > 0 else "not reliant", p, centre, error, of.freedom, change)


def _has_texts(pairs: PairArrays) -> bool:
    """Return whether an answer has a text: images alone differ in their pixels, and grey leaves nothing of them."""
    return not np.isnan(pairs.longer).all() or not bool((pairs.sides("pixels") > 0).any())


def analyse(frame: pd.DataFrame, findings: Sequence[Finding] | None = None) -> dict[str, Any]:
    """Return `figures` of the scored pairs of one checkpoint: `overall`, by `category`, and for every column by/NAME.

    Rows without a value are in `overall` only. `audit` are the `findings`, by default those of the audit of `frame`.
    """
    check_pairs(frame)
    columns = [name for name in map(str, frame) if name.startswith(GROUP)]
    return {
        "overall": figures(frame),
        "category": _by_value(frame, "category") if "category" in frame else {},
        "by": {name.removeprefix(GROUP): _by_value(frame, name) for name in columns},
        "audit": [_plain(finding) for finding in (audit(frame) if findings is None else findings)],
    }


def figures(frame: pd.DataFrame) -> dict[str, Any]:
    """Return every metric of the pairs of `frame` by name, as JSON has it; NaN where the rows do not allow it.

    An estimate is {value, low, high, standard_error, n, prompts}.
    """
    pairs = PairArrays(frame)
    computed = ((metric.name, metric.compute(pairs)) for metric in METRICS.values())
    return {n: _plain(v.estimate(pairs.clusters) if isinstance(v, Figure) else v) for n, v in computed}


def point_figures(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, float]:
    """Return some metrics of the pairs of `frame` without their intervals, by name."""
    pairs = PairArrays(frame)
    return {name: METRICS[name].point(pairs) for name in names}


def trl_summary(frame: pd.DataFrame) -> dict[str, float]:
    """Return the figures of all `scored_pairs` that the trainer logs, under TRL's names, which dashboards know."""
    pairs = PairArrays(frame)
    rewards = pairs.sides("score").ravel()
    return {
        **{metric.logged: metric.point(pairs) for metric in METRICS.values() if metric.logged},
        "mean_reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "min_reward": float(rewards.min(initial=np.inf)),
        "max_reward": float(rewards.max(initial=-np.inf)),
    }


def metric(figures: Mapping[str, Any], name: str) -> float:
    """Return one number of `figures` by its name, to choose a checkpoint by, or to require."""
    value = figures.get(name)
    if isinstance(value, Mapping):
        value = value.get("value")
    if not isinstance(value, (int, float)):
        names = ", ".join(n for n, v in figures.items() if isinstance(v, (int, float)) or "value" in v)
        raise ConfigError(f"there is no metric {name}: choose one of {names or 'another kind, the data give none'}")
    if math.isnan(value):
        needs = METRICS[name].needs if name in METRICS else None
        reason = f"the pairs have nothing in column {needs}" if needs else "no pair allows it"
        raise ConfigError(f"the metric {name} cannot be computed, because {reason}: choose another or add it")
    return float(value)


def _plain(value: Any) -> Any:
    """Return a figure with dictionaries for named tuples."""
    if isinstance(value, list):
        return list(map(_plain, value))
    return {name: _plain(part) for name, part in value._asdict().items()} if isinstance(value, tuple) else value


def _by_value(frame: pd.DataFrame, column: str) -> dict[str, dict[str, Any]]:
    return {str(value): figures(rows) for value, rows in frame.groupby(column, observed=True)}
