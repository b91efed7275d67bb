"""Intervals of benchmark figures: what they rest on, and that they cover."""

import math

import numpy as np
import pandas as pd
import pytest

from vlmrm.evaluation.public import benchmark
from vlmrm.evaluation.public.rules import with_intervals


def scored(right, prompts, categories="all"):
    """Pairs that are right or wrong, with their prompts and categories."""
    right = np.asarray(right, dtype=float)
    ids = [f"c{i}" for i in range(len(right))]
    return pd.DataFrame(
        {"comparison_id": ids, "cluster": prompts, "category": categories, "tie": False, "chosen_branch": 0}
    ).assign(chosen_score=right, rejected_score=0.5)


def share(frame):
    return {"accuracy": float((frame["chosen_score"] > frame["rejected_score"]).mean())}


def test_standard_error_over_prompts_matches_the_textbook():
    right = np.random.default_rng(0).random(40) < 0.7
    figure = benchmark("hpdv3").estimate(scored(right, np.arange(40)))["accuracy"]
    assert figure.standard_error == pytest.approx(np.std(right, ddof=1) / math.sqrt(40))
    assert 0 < figure.low < figure.value < figure.high < 1
    assert (figure.n, figure.clusters) == (40, 40)


def test_pairs_of_a_cluster_count_once():
    right = np.random.default_rng(1).random(30) < 0.6
    once = benchmark("hpdv3").estimate(scored(right, np.arange(30)))["accuracy"]
    often = benchmark("hpdv3").estimate(scored(np.repeat(right, 9), np.repeat(np.arange(30), 9)))["accuracy"]
    assert often[:4] == pytest.approx(once[:4])
    assert (often.n, often.clusters) == (270, 30)


def test_mm_rlhf_counts_questions_rather_than_prompts():
    rng = np.random.default_rng(2)
    frame = scored(rng.random(92) < 0.9, np.arange(92), ["mcq", "video"] * 46)
    frame["by/question_id"] = np.repeat(np.arange(46), 2)
    figure = benchmark("mm-rlhf-rewardbench").estimate(frame)
    assert (figure["acc_plus"].n, figure["acc_plus"].clusters) == (92, 46)
    assert (figure["mcq/acc"].n, figure["mcq/acc"].clusters) == (46, 46)
    assert figure["acc_plus"].high - figure["acc_plus"].low > 0.15


def test_a_figure_counts_the_rows_it_names():
    categories = ["safety/bias"] * 3 + ["safety/toxicity"] * 4 + ["vqa"] * 5
    figure = benchmark("multimodal-rewardbench").estimate(scored([1, 0, 1] * 4, np.arange(12), categories))
    assert {name: figure.n for name, figure in figure.items()} == {
        "overall": 12,
        "safety": 7,
        "safety/bias": 3,
        "safety/toxicity": 4,
        "vqa": 5,
    }


def test_no_interval_is_made_up():
    alone = benchmark("hpdv3").estimate(scored([1, 0], ["p", "p"]))["accuracy"]
    assert math.isnan(alone.low) and math.isnan(alone.standard_error) and alone.clusters == 1
    perfect = benchmark("hpdv3").estimate(scored([1] * 20, np.arange(20)))["accuracy"]
    assert perfect.high == 1 and 0.75 < perfect.low < 0.9, "all of 20 right is not certainty"
    thin = benchmark("vl-rewardbench").estimate(
        scored([1, 0, 1, 1, 0], np.arange(5), ["general"] * 2 + ["hallucination"] * 2 + ["reasoning"])
    )
    assert math.isnan(thin["reasoning"].low) and math.isnan(thin["macro"].low)
    assert thin["overall"].low < thin["overall"].high


@pytest.mark.parametrize(("prompts", "most", "accuracy"), [(12, 9, 0.7), (46, 5, 0.8)])
def test_the_interval_covers(prompts, most, accuracy):
    """Between 91 and 98.5 % of 250 sets, whose pairs agree within prompts (a simulation has ±3 points itself)."""
    rng, held, count = np.random.default_rng(3), 0, 250
    for _ in range(count):
        sizes = rng.integers(1, most + 1, prompts)
        skill = rng.beta(accuracy * 4, (1 - accuracy) * 4, prompts) if most > 1 else np.full(prompts, accuracy)
        units = np.repeat(np.arange(prompts), sizes)
        right = (rng.random(len(units)) < skill[units]).astype(float)
        frame = pd.DataFrame({"category": "all", "chosen_score": right, "rejected_score": 0.5})
        rows = {"accuracy": np.ones(len(units), dtype=bool)}
        figure = with_intervals(share, frame, share(frame), units, rows)["accuracy"]
        held += figure.low <= accuracy <= figure.high
    assert 0.91 <= held / count <= 0.985
