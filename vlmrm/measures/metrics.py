"""Metrics of scored pairs, each declared once: name, meaning, the better end, and the columns that it needs.

All read `METRICS`: the table of a sweep (CSV), its details (JSON), the choice of a checkpoint, the trainer's `eval_`
figures, the report and docs/evaluation.md. To add a metric, add an entry; a plugin calls `register`.

Metrics of shortcuts are over the pairs that people did not tie, and count equal scores as half right: a model that
ignores images scores two answers about a grey image as before, and two grey images equally. A *reliance* is what is
lost under an intervention: the figure of the pairs as they are, minus that of the same pairs changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from vlmrm.errors import ConfigError
from vlmrm.measures.intervals import Correlation, Estimate, Figure, Mean
from vlmrm.measures.interventions import FOLLOWERS, INTERVENTIONS, Intervention
from vlmrm.measures.pairs import PairArrays, credits_of
from vlmrm.measures.statistics import (
    AtEqualStyle,
    BestOfN,
    CalibrationError,
    ReliabilityBin,
    Temperature,
    log_losses,
    spearman_within,
    squared_errors,
)

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Distribution(NamedTuple):
    """Mean, standard deviation, range and quantiles of some values; all NaN for no values."""

    mean: float
    std: float
    min: float
    max: float
    q05: float
    q25: float
    q50: float
    q75: float
    q95: float


@dataclass(frozen=True)
class Metric:
    """A figure of scored pairs: how it is computed, what it means, and where it is shown."""

    name: str
    meaning: str  # a definition, for docs/evaluation.md
    compute: Callable[[PairArrays], Any]  # returns a `Figure`, or where `kind` is another type what is shown
    kind: Any = Estimate
    better: Literal["higher", "lower"] | None = None  # None where no checkpoint can be chosen by it
    needs: str | None = None  # the column of the scored pairs without which it is NaN
    column: bool = False  # whether it is a column of the table of a sweep (CSV)
    label: str = ""  # its name in the report: the head of a column, or the subject of a sentence
    percent: bool = False  # whether the report writes it as a percentage
    logged: str = ""  # TRL's name for it, under which the trainer logs it as eval_NAME

    def point(self, pairs: PairArrays) -> float:
        """Return the figure of the pairs alone, without its interval."""
        computed = self.compute(pairs)
        return computed.influence().value if isinstance(computed, Figure) else computed

    def value(self, figures: dict[str, Any]) -> float:
        """Return the number in `vlmrm.measures.analysis.figures`: of an estimate its value."""
        figure = figures[self.name]
        return figure["value"] if self.kind is Estimate else figure


def distribution(values: np.ndarray) -> Distribution:
    """Return the distribution of values[N]."""
    values = values if len(values) else np.array([np.nan])
    parts = (values.mean(), values.std(), values.min(), values.max(), *np.quantile(values, QUANTILES))
    return Distribution(*map(float, parts))


def _altered(intervention: Intervention) -> Metric:
    """Return the accuracy under an intervention: a column of the table where the intervention was scored."""
    return Metric(
        f"{intervention.name}_accuracy",
        f"accuracy {intervention.condition}, equal scores as half right",
        lambda p: share_of(credits_of(p.altered_margins(intervention.name))),
        needs=f"{intervention.name}_chosen",
        column=True,
        label=intervention.name.replace("_", " "),
        percent=True,
    )


def _loss(intervention: Intervention) -> Metric:
    return Metric(
        intervention.loss,
        f"accuracy that `{intervention.name}` takes away",
        lambda p: Mean(p.credits - credits_of(p.altered_margins(intervention.name)), scale="difference"),
        better="higher" if intervention.removes else "lower",
        needs=f"{intervention.name}_chosen",
    )


def share_of(values: np.ndarray, weights: np.ndarray | None = None) -> Mean:
    """Return the mean of values [N] from 0 to 1, with an interval that stays between them."""
    return Mean(values, weights, scale="share")


# In the order in which the table, the details and the guide have them.
_DECLARED = (
    Metric(
        "preference_accuracy",
        "share of pairs with the chosen answer above the rejected; equal scores count half",
        lambda p: share_of(p.credits),
        better="higher",
        column=True,
        percent=True,
        logged="accuracy",
    ),
    Metric(
        "average_margin",
        "mean score of the chosen minus that of the rejected",
        lambda p: Mean(p.margins),
        better="higher",
        column=True,
        label="mean margin",
        logged="margin",
    ),
    Metric(
        "margin_std",
        "standard deviation of that difference",
        lambda p: float(p.decided.std()) if len(p.decided) else float("nan"),
        float,
        column=True,
        logged="margin_std",
    ),
    Metric(
        "sample_count",
        "pairs with a preference; a ranked list of K answers has up to K(K-1)/2",
        lambda p: len(p.decided),
        int,
        column=True,
        logged="pairs",
    ),
    Metric(
        "score_ties",
        "pairs with a preference and equal scores",
        lambda p: int((p.decided == 0).sum()),
        int,
        column=True,
    ),
    Metric(
        "tied_pairs",
        "pairs that people called equal; no figure counts them but this one, `tied_margin` and `score`",
        lambda p: int(p.frame["tie"].sum()),
        int,
        column=True,
    ),
    Metric(
        "loss",
        "mean `-log σ(margin)`, the Bradley-Terry loss",
        lambda p: Mean(log_losses(p.margins), scale="positive"),
        better="lower",
        column=True,
        label="loss",
        logged="loss",
    ),
    *map(_altered, INTERVENTIONS.values()),
    Metric(
        "position_consistency",
        "share of pairs of which a judge gives the same verdict in both orders",
        lambda p: share_of(np.where(np.isnan(p.positions[:, 0]), np.nan, p.positions[:, 0] == p.positions[:, 1])),
        better="higher",
        needs="credit_first",
        column=True,
        label="position consistency",
        percent=True,
    ),
    Metric(
        "first_shown_credit",
        "mean credit that a judge gives to the answer shown first: a half without a preference for a position",
        lambda p: share_of((p.positions[:, 0] + 1 - p.positions[:, 1]) / 2),
        needs="credit_first",
        column=True,
        label="credit of the answer shown first",
        percent=True,
    ),
    Metric("comparison_count", "comparisons", lambda p: len(np.bincount(p.candidates.groups)), int),
    Metric(
        "cluster_count",
        "images with all their questions, or prompts without images: the units of intervals",
        lambda p: int(p.frame["cluster"].nunique()),
        int,
    ),
    Metric(
        "weighted_accuracy",
        "preference accuracy of pairs weighted by their `weight`",
        lambda p: share_of(p.credits, p.column("weight")),
        better="higher",
    ),
    Metric(
        "groupwise_accuracy",
        "acc+: comparisons of which every pair is right",
        lambda p: share_of(p.groups_right),
        better="higher",
    ),
    Metric(
        "tied_margin",
        "mean absolute margin of pairs that people tied",
        lambda p: Mean(
            np.where(np.isnan(p.margins), np.abs(np.diff(p.sides("score"))[:, 0]), np.nan), scale="positive"
        ),
        better="lower",
    ),
    Metric(
        "brier", "mean `(1 - σ(margin))²`", lambda p: Mean(squared_errors(p.margins), scale="positive"), better="lower"
    ),
    Metric("ece", "expected calibration error of `σ(margin)`", lambda p: CalibrationError(p.margins), better="lower"),
    Metric("temperature", "the T for which `σ(margin / T)` is likeliest", lambda p: Temperature(p.margins)),
    Metric(
        "length_baseline_accuracy",
        "how often the longer answer is the chosen one, equal lengths as half",
        lambda p: share_of(credits_of(p.longer)),
        needs="chosen_length",
        percent=True,
    ),
    Metric(
        "accuracy_chosen_longer",
        "accuracy where the chosen answer is the longer one",
        lambda p: share_of(np.where(p.longer > 0, p.credits, np.nan)),
        better="higher",
        needs="chosen_length",
    ),
    Metric(
        "accuracy_chosen_shorter",
        "accuracy where the chosen answer is the shorter one",
        lambda p: share_of(np.where(p.longer < 0, p.credits, np.nan)),
        better="higher",
        needs="chosen_length",
    ),
    Metric(
        "style_controlled_accuracy",
        "accuracy where both answers have the same length and markup: a Bradley-Terry model with their differences",
        lambda p: AtEqualStyle(p.credits, p.style),
        better="higher",
        needs="chosen_length",
        percent=True,
    ),
    Metric(
        "margin_length_correlation",
        "Spearman: the margin and how much longer the chosen answer is",
        lambda p: Correlation(p.margins, p.longer),
        needs="chosen_length",
        label="Margin and length difference",
    ),
    Metric(
        "score_area_correlation",
        "Spearman: the score and the pixels of the images in the answer, where there are any",
        lambda p: Correlation(p.scores, np.where(p.sides("pixels") > 0, p.sides("pixels"), np.nan)),
        needs="chosen_pixels",
        label="Score and area of an answer's images",
    ),
    *map(_loss, INTERVENTIONS.values()),
    Metric(
        "swapped_prompt_margin",
        "mean margin under another row's prompt, its question and images at once, where neither answer should win",
        lambda p: Mean(p.altered_margins("swapped_prompt")),
        needs="swapped_prompt_chosen",
    ),
    Metric(
        "prompt_reliance",
        "mean margin that is lost under another row's prompt",
        lambda p: Mean(p.margins - p.altered_margins("swapped_prompt")),
        better="higher",
        needs="swapped_prompt_chosen",
    ),
    Metric("margin", "how the margins are distributed", lambda p: distribution(p.decided), Distribution),
    Metric(
        "score", "how all scores are distributed, each once", lambda p: distribution(p.candidates.scores), Distribution
    ),
    Metric(
        "reliability",
        "bins of the probability: `low`, `high`, `count`, mean `probability`, `frequency` with which it came true",
        lambda p: p.reliability,
        list[ReliabilityBin],
    ),
    Metric(
        "spearman_within",
        "Spearman's rho of scores and ratings, mean over lists",
        lambda p: p.of_lists(spearman_within(*p.candidates)),
        better="higher",
    ),
    Metric(
        "best_of_n",
        "for lists of three and more: `n`, `lists` with so many, and the expected rating of the best by `model`, by "
        "the ratings (`oracle`), and of any (`random`)",
        lambda p: p.best_of_n,
        list[BestOfN],
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}  # by name, in the order of tables


def register(*metrics: Metric) -> None:
    """Add metrics, as a plugin does."""
    for metric in metrics:
        if metric.name in METRICS:
            raise ConfigError(f"there is already a metric {metric.name}: give yours another name.")
        METRICS[metric.name] = metric


FOLLOWERS.append(lambda intervention: register(_altered(intervention), _loss(intervention)))
