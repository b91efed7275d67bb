"""Choosing a checkpoint: by any figure that has a better end, and the earliest within one standard error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vlmrm.errors import ConfigError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.choosing import Criterion


def row(step: int | str, model: str = "run", error: str | None = None, **overall: Any) -> Any:
    """A row with figures: numbers, or (value, standard error)."""
    found = {
        name: {"value": value[0], "standard_error": value[1]} if isinstance(value, tuple) else value
        for name, value in overall.items()
    }
    name = f"checkpoint-{step}" if isinstance(step, int) else step
    statistics = {"overall": found, "category": {"hard": found} if found else {}}
    path = f"{model}/{name}"
    return {"model": model, "checkpoint": name, "path": path, "error": error, "statistics": statistics}


def names(rows) -> list[str]:
    return [each["path"].removeprefix("run/checkpoint-") for each in rows]


def test_more_is_better_or_less_is():
    rows = [row(n, preference_accuracy=(v, 0.1), loss=(v, 0.1), ece=v) for n, v in ((1, 0.5), (2, 0.9), (3, 0.7))]
    assert names(Criterion().ranked(rows)) == ["2", "3", "1"]
    assert names(Criterion("loss").ranked(rows)) == names(Criterion("ece").ranked(rows)) == ["1", "3", "2"]
    assert names(Criterion("accuracy/hard").ranked(rows)) == ["2", "3", "1"]
    assert Criterion("accuracy/spelling_error").higher_is_better and not Criterion("red_error").higher_is_better
    best = Criterion("loss").best(rows)
    assert best is not None and (best["path"], best["value"]) == ("run/checkpoint-1", 0.5)
    scored = [each | {"benchmark": {"macro": value}} for each, value in zip(rows, (0.3, 0.1, 0.2), strict=True)]
    assert names(Criterion("benchmark/macro").ranked(scored)) == ["1", "3", "2"]


def test_the_earlier_of_equals_is_better():
    rows = [row(n, preference_accuracy=(0.9, 0.1)) for n in (30, 4, 200)]
    assert names(Criterion().ranked(rows)) == ["4", "30", "200"]


def test_rows_without_the_figure_are_left_out():
    rows = [row(1, error="broken"), row(2, position_consistency=(math.nan, math.nan), preference_accuracy=(0.5, 0.1))]
    by_position = Criterion("position_consistency")
    assert names(Criterion().ranked(rows)) == ["2"]
    assert by_position.best(rows) is None
    with pytest.raises(ConfigError, match="nothing in column credit_first"):
        by_position.require(rows)
    with pytest.raises(ConfigError, match="accuracy/easy: choose one of accuracy/hard"):
        Criterion("accuracy/easy").require([row(2, preference_accuracy=(0.5, 0.1))])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"metric_for_best": "acuracy"}, "acuracy, .* choose .*preference_accuracy"),
        ({"metric_for_best": "temperature"}, "temperature"),
        ({"metric_for_best": "blank_image_accuracy"}, "no checkpoint is better"),
        ({"metric_for_best": "benchmark/macro"}, "needs a benchmark"),
        ({"metric_for_best": "image_reliance", "interventions": "none"}, "needs blank_image"),
        ({"metric_for_best": "loss", "fail_under": 0.5}, "loss"),
        ({"fail_under": 75}, "from 0 to 1"),
    ],
)
def test_impossible_criteria_are_refused_before_scoring(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        EvaluationArguments(model_dirs=["run"], **keys)
    assert EvaluationArguments(model_dirs=["run"], metric_for_best="average_margin", fail_under=2.0).fail_under == 2
