"""Figures against arithmetic by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from tests.conversations import rated
from vlmrm.evaluation.results import table_figures
from vlmrm.measures.analysis import figures, trl_summary
from vlmrm.measures.metrics import distribution
from vlmrm.measures.pairs import scored_pairs

RATINGS = {"a": [1, 0], "b": [0, 1], "c": [1, 0], "tie": [1, 1], "list": [3, 1, 2]}
PAIRS = scored_pairs(
    [rated(row_id, [], [[]] * len(ratings), ratings) for row_id, ratings in RATINGS.items()],
    [[2.0, 1.0], [0.5, -0.5], [1.0, 1.0], [9.0, 0.0], [0.3, 0.1, 0.2]],
)


def test_every_pair_of_comparisons_puts_the_better_first():
    assert PAIRS["comparison_id"].tolist() == ["a", "b", "c", "tie", "list", "list", "list"]
    margins = (PAIRS["chosen_score"] - PAIRS["rejected_score"])[~PAIRS["tie"]]
    np.testing.assert_allclose(margins, [1.0, -1.0, 0.0, 0.2, 0.1, 0.1])


def test_the_table_counts_rating_and_score_ties_apart():
    margins = [1.0, -1.0, 0.0, 0.2, 0.1, 0.1]
    mean = sum(margins) / 6

    table = table_figures(figures(PAIRS))

    assert (table["sample_count"], table["score_ties"], table["tied_pairs"]) == (6, 1, 1)
    assert table["preference_accuracy"] == pytest.approx(4.5 / 6)
    assert table["average_margin"] == pytest.approx(mean)
    assert table["margin_std"] == pytest.approx(math.sqrt(sum((m - mean) ** 2 for m in margins) / 6))
    assert table["loss"] == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 6)


def test_trl_names_hold_the_same_figures():
    ours, theirs = table_figures(figures(PAIRS)), trl_summary(PAIRS)
    for name, other in {"accuracy": "preference_accuracy", "margin": "average_margin", "loss": "loss"}.items():
        assert theirs[name] == pytest.approx(ours[other])
    assert (theirs["min_reward"], theirs["max_reward"], theirs["pairs"]) == (-0.5, 9.0, 6)


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
