"""The whole analysis: each figure where it belongs, for all pairs and for each group of them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from tests.pair_frames import list_frame, pair_frame
from vlmrm.errors import ConfigError
from vlmrm.measures import metrics, statistics
from vlmrm.measures.analysis import analyse, figures, metric

MARGINS = np.array([1.5, -0.5, 0.0, 2.0, 0.25, -1.0])
FRAME = pair_frame(
    MARGINS,
    tie=[False, False, False, False, False, True],
    weight=[1, 2, 1, 4, 1, 1],
    category=["x", "y", "x", None, "y", "y"],
    **{"by/split": ["val", "val", "test", "test", "test", "test"]},
)


def test_figures_are_those_of_the_plain_functions():
    found, decided = figures(FRAME), MARGINS[:5]

    assert [found[name] for name in ("sample_count", "comparison_count", "cluster_count")] == [5, 6, 6]
    for name, value in {
        "preference_accuracy": 3.5 / 5,
        "weighted_accuracy": 6.5 / 9,
        "groupwise_accuracy": 3 / 5,
        "tied_margin": 1.0,
        "brier": statistics.squared_errors(decided).mean(),
    }.items():
        assert found[name]["value"] == pytest.approx(value), name
        assert metric(found, name) == found[name]["value"]
    assert found["score"] == metrics.distribution(np.concatenate([MARGINS, np.zeros(6)]))._asdict()
    assert found["temperature"]["value"] == statistics.fitted_temperature(decided)


def test_groups_are_analysed_alone():
    found = analyse(FRAME)
    assert list(found["category"]) == ["x", "y"] and list(found["by"]) == ["split"]
    pd.testing.assert_series_equal(
        pd.Series(found["category"]["y"]), pd.Series(figures(FRAME[FRAME["category"] == "y"]))
    )
    assert {value: rows["sample_count"] for value, rows in found["by"]["split"].items()} == {"test": 3, "val": 2}


def test_ranked_lists_have_an_order_and_a_best():
    frame = list_frame([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 0.0]], [[3, 1, 2], [3, 1, 2], [1, 0]])
    found = figures(frame)
    assert found["groupwise_accuracy"]["value"] == pytest.approx(2 / 3)
    assert found["spearman_within"]["value"] == pytest.approx(np.mean([1, -0.5, 1]))
    assert [row["lists"] for row in found["best_of_n"]] == [2, 2, 2], "pairs are no lists"
    best_of_three = found["best_of_n"][2]
    assert [best_of_three[kind]["value"] for kind in ("model", "oracle", "random")] == [2.5, 3.0, 2.0]


def test_pairs_that_people_all_tied_have_no_accuracy():
    found = figures(pair_frame([1.0, 2.0], tie=True))
    assert found["sample_count"] == 0 and math.isnan(found["preference_accuracy"]["value"])
    with pytest.raises(ConfigError, match="preference_accuracy"):
        metric(found, "preference_accuracy")


@pytest.mark.parametrize(
    ("name", "named"),
    [("image_reliance", "blank_image_chosen"), ("acuracy", "preference_accuracy"), ("reliability", "reliability")],
)
def test_a_figure_that_cannot_be_is_refused(name, named):
    with pytest.raises(ConfigError, match=named):
        metric(figures(FRAME), name)
