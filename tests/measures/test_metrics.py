"""Figures against arithmetic by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import get_args, get_origin

import numpy as np
import pytest
from conversations import rated

from vlmrm.conversation import Comparison
from vlmrm.evaluation.results import table_figures
from vlmrm.measures.analysis import analyse, figures, trl_summary
from vlmrm.measures.intervals import Estimate, Figure
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS, distribution
from vlmrm.measures.pairs import PairArrays, groupwise_right, scored_pairs


def comparison(row_id: str, *ratings: float, category: str | None = None) -> Comparison:
    return rated(row_id, [], [[]] * len(ratings), ratings, category=category)


PAIRS = scored_pairs(
    [
        comparison("a", 1, 0, category="x"),
        comparison("b", 0, 1, category="y"),
        comparison("c", 1, 0, category="x"),
        comparison("tie", 1, 1, category="y"),
        comparison("list", 3, 1, 2),
    ],
    [[2.0, 1.0], [0.5, -0.5], [1.0, 1.0], [9.0, 0.0], [0.3, 0.1, 0.2]],
)


def test_every_pair_of_every_comparison_counts_the_better_first():
    assert PAIRS["comparison_id"].tolist() == ["a", "b", "c", "tie", "list", "list", "list"]
    margins = (PAIRS["chosen_score"] - PAIRS["rejected_score"])[~PAIRS["tie"]]
    np.testing.assert_allclose(margins, [1.0, -1.0, 0.0, 0.2, 0.1, 0.1])


def test_the_table_counts_ties_of_people_and_of_scores_apart():
    margins = [1.0, -1.0, 0.0, 0.2, 0.1, 0.1]
    mean = sum(margins) / 6
    found = figures(PAIRS)
    expected = {
        "preference_accuracy": pytest.approx(4 / 6),
        "average_margin": pytest.approx(mean),
        "margin_std": pytest.approx(math.sqrt(sum((m - mean) ** 2 for m in margins) / 6)),
        "sample_count": 6,
        "score_ties": 1,
        "tied_pairs": 1,
        "loss": pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 6),
    }
    table = table_figures(found)
    assert {name: table[name] for name in expected} == expected
    assert not any(name.startswith(tuple(INTERVENTIONS)) for name in table), "none was scored"
    assert found["accuracy_half_ties"]["value"] == pytest.approx(4.5 / 6)


def test_categories_are_those_that_rows_have():
    found = analyse(PAIRS)["category"]
    assert list(found) == ["x", "y"]
    assert (found["x"]["sample_count"], found["x"]["preference_accuracy"]["value"]) == (2, 0.5)
    assert (found["y"]["sample_count"], found["y"]["tied_pairs"]) == (1, 1)


def test_trl_names_hold_the_same_figures():
    ours, theirs = table_figures(figures(PAIRS)), trl_summary(PAIRS)
    for name, other in {"accuracy": "preference_accuracy", "margin": "average_margin", "loss": "loss"}.items():
        assert theirs[name] == pytest.approx(ours[other])
    assert (theirs["min_reward"], theirs["max_reward"], theirs["pairs"]) == (-0.5, 9.0, 6)


def test_every_metric_is_of_the_kind_that_it_says_and_has_a_name_of_its_own():
    pairs = PairArrays(PAIRS)
    for metric in METRICS.values():
        kinds = Figure if metric.kind is Estimate else get_args(metric.kind) or metric.kind
        computed = metric.compute(pairs)
        values = computed if get_origin(metric.kind) is list else [computed]
        assert values and all(isinstance(value, kinds) for value in values), metric.name


def test_without_pairs_there_are_no_figures():
    empty = trl_summary(scored_pairs([], []))
    assert empty["pairs"] == 0 and math.isnan(empty["accuracy"]) and math.isnan(empty["mean_reward"])


def test_a_comparison_is_right_when_every_pair_is():
    margins = np.array([1.0, 1.0, -1.0, 2.0, 0.0])
    assert groupwise_right(margins, np.array([0, 1, 1, 2, 3])).tolist() == [True, False, True, False]


def test_distribution_of_a_known_sample():
    found = distribution(np.arange(101.0))._asdict()
    assert found["std"] == pytest.approx(math.sqrt((101**2 - 1) / 12))
    del found["std"]
    assert found == {"mean": 50, "min": 0, "max": 100, "q05": 5, "q25": 25, "q50": 50, "q75": 75, "q95": 95}
    assert all(map(math.isnan, distribution(np.zeros(0))))


def test_measures_are_read_without_torch():
    """Reports and tables of figures are made where nothing is trained or scored."""
    code = "import sys, vlmrm.measures.analysis, vlmrm.measures.plots; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
