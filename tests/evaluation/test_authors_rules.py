"""The rules of public benchmarks give what their authors' own code gave for the same made scores.

`EXPECTED` holds the figures of the authors' code, which was run on the rows that the functions here make (commit and
function stand beside each). Scores are rounded, so that many are equal.
"""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from vlmrm.evaluation.public import benchmark
from vlmrm.evaluation.public.rules import accuracy_with_ties, accuracy_without_ties, best_threshold


def frame_of(items):
    """Scored pairs of rows `{"id", "category", "scores", "ratings"}` with further columns `by/...`."""
    rows = []
    for item in items:
        further = {name: value for name, value in item.items() if name.startswith("by/")}
        scores, ratings = item["scores"], item["ratings"]
        for first, second in combinations(range(len(scores)), 2):
            better, worse = (second, first) if ratings[first] < ratings[second] else (first, second)
            rows.append(
                {
                    "comparison_id": item["id"],
                    "cluster": item["id"],
                    "category": item["category"],
                    "tie": ratings[first] == ratings[second],
                    "chosen_branch": better,
                    "rejected_branch": worse,
                    "chosen_score": scores[better],
                    "rejected_score": scores[worse],
                    **further,
                }
            )
    return pd.DataFrame(rows)


def rewardbench_2():
    """Best of four for five subsets, then prompts with several right answers beside references with one."""
    rng, items = np.random.default_rng(1), []
    for subset in ("factuality", "precise if", "math", "safety", "focus"):
        for number in range(20):
            scores = np.round(rng.normal([0.5, 0, 0, 0], 1), 1).tolist()
            name = f"{subset}:{number}"
            row = {"id": name, "category": subset, "scores": scores, "ratings": [1, 0, 0, 0]}
            items.append(row | {"by/row": name, "by/unit": name})
    for number in range(20):
        for kind, right in (("ref", 1), ("tied", int(rng.integers(2, 5)))):
            wrong = int(rng.integers(1, 5))
            scores = np.round(np.r_[rng.normal(2, 0.4, right), rng.normal(0, 0.8, wrong)], 1).tolist()
            row = {
                "id": f"{kind}:{number}",
                "category": "ties",
                "scores": scores,
                "ratings": [1] * right + [0] * wrong,
            }
            items.append(row | {"by/row": row["id"], "by/unit": f"ties:{number}"})
    return items


def rm_bench():
    rng = np.random.default_rng(2)
    domains = ("chat", "math", "code", "safety", "safety")
    return [
        {
            "id": str(number),
            "category": domains[number % 5],
            "scores": np.round(rng.normal([0.4, 0.6, 0.8, 0, 0.3, 0.5], 1), 1).tolist(),
            "ratings": [1, 1, 1, 0, 0, 0],
        }
        for number in range(100)
    ]


def editscore():
    rng, items = np.random.default_rng(4), []
    for task in (name for group in benchmark("editreward-bench-editscore").groups.values() for name in group):
        for dimension in ("prompt_following", "consistency", "overall"):
            for number in range(6):
                row = {"id": f"{task}/{dimension}/{number}", "category": dimension, "ratings": [1, 0], "by/task": task}
                items.append(row | {"scores": np.round(rng.normal([0.5, 0], 1), 1).tolist()})
    return items


def editreward():
    """Votes on two images, with ties, and orders of three and four, a row a pair as in the hub's table."""
    rng, items = np.random.default_rng(5), []
    for size in (2, 3, 4):
        for number in range(30):
            scores = (np.round(rng.normal(size=size), 2) + np.arange(size) / 1000).tolist()  # no two are equal
            ratings = (np.array(scores) + rng.normal(size=size)).tolist()
            if size == 2 and number % 3 == 0:
                ratings = [0.0, 0.0]
            items.append({"size": size, "scores": scores, "ratings": ratings, "by/source": f"{size}-{number}"})
    return items


def as_pairs(items):
    return [
        {
            "id": f"{item['by/source']}/{i}{j}",
            "category": f"{item['size']}pair",
            "by/source": item["by/source"],
            "scores": [item["scores"][i], item["scores"][j]],
            "ratings": [item["ratings"][i], item["ratings"][j]],
        }
        for item in items
        for i, j in combinations(range(item["size"]), 2)
    ]


def mmrb2():
    rng, items = np.random.default_rng(6), []
    for task in ("t2i", "edit", "interleaved", "reasoning"):
        for number in range(40):
            row = {"id": f"{task}{number}", "category": task, "scores": rng.normal(size=2).tolist()}
            items.append(row | {"ratings": [[1, 0], [0, 1]][int(rng.integers(2))]})
    return items


def votes(repeated):
    """Labels of people and margins, repeated ones or not."""
    rng = np.random.default_rng(7)
    label = rng.integers(-1, 2, 60)
    margin = rng.normal(size=60) + 0.8 * label
    return label, np.round(margin * 2) / 2 if repeated else margin


EXPECTED = {
    # allenai/reward-bench 05a9005: reroll_and_score_dataset, process_single_model
    "rewardbench-2": {
        "factuality": 0.475,
        "focus": 0.5,
        "math": 0.325,
        "precise if": 0.5,
        "safety": 0.4,
        "ties": 0.889313775432413,
        "overall": 0.514885629238735,
    },
    # THU-KEG/RM-Bench 73c52d7: compute_accuracy
    "rm-bench": {
        "overall": 0.538888888888889,
        "hard": 0.452083333333333,
        "normal": 0.55625,
        "easy": 0.608333333333333,
        "chat": 0.511111111111111,
        "math": 0.483333333333333,
        "code": 0.55,
        "safety": 0.611111111111111,
    },
    # VectorSpaceLab/EditScore 6e0f1b9: calculate_statistics.py
    "editreward-bench-editscore": {
        "prompt_following": 0.59,
        "consistency": 0.628,
        "overall": 0.679,
        "overall/object": 0.667,
        "overall/appearance": 0.667,
        "overall/scene": 0.667,
        "overall/advanced": 0.708,
    },
    # TIGER-AI-Lab/EditReward edb027e: evaluate_edit_reward_bench
    "editreward-bench-tiger": {
        "overall": 0.411111111111111,
        "2pair": 0.6,
        "3pair": 0.4,
        "4pair": 0.233333333333333,
        "pairs_with_ties": 0.69,
    },
    # facebookresearch/MMRB2 7ff0552: compute_task_accuracy
    "multimodal-rewardbench-2": {
        "overall": 0.4625,
        "t2i": 0.575,
        "edit": 0.3,
        "interleaved": 0.55,
        "reasoning": 0.425,
    },
    # KwaiVGI/VideoAlign: calc_accuracy.py
    "videogen-rewardbench": {
        "with_ties": 0.566666666666667,
        "without_ties": 0.717948717948718,
        "repeated_with_ties": 0.533333333333333,
        "repeated_without_ties": 0.615384615384615,
    },
}


@pytest.mark.parametrize(
    ("name", "items"),
    [
        ("rewardbench-2", rewardbench_2),
        ("rm-bench", rm_bench),
        ("editreward-bench-editscore", editscore),
        ("editreward-bench-tiger", lambda: as_pairs(editreward())),
        ("multimodal-rewardbench-2", mmrb2),
    ],
)
def test_the_authors_code_gives_the_same_figures(name, items):
    figures = benchmark(name).score(frame_of(items()))
    precision = 5e-4 if name == "editreward-bench-editscore" else 1e-12  # theirs are printed with three digits
    assert {key: figures[key] for key in EXPECTED[name]} == pytest.approx(EXPECTED[name], abs=precision)


def test_videoalign_s_thresholds():
    """VideoAlign's calc_accuracy.py is the same for margins that differ; equal ones it lets fall on both sides."""
    label, margin = votes(repeated=False)
    figures = EXPECTED["videogen-rewardbench"]
    assert accuracy_with_ties(label, margin) == pytest.approx(figures["with_ties"], abs=1e-12)
    assert accuracy_without_ties(label, margin) == pytest.approx(figures["without_ties"], abs=1e-12)
    label, margin = votes(repeated=True)
    assert accuracy_without_ties(label, margin) == pytest.approx(figures["repeated_without_ties"], abs=1e-12)
    assert accuracy_with_ties(label, margin) < figures["repeated_with_ties"]


def test_editreward_s_threshold_may_be_zero():
    """Where nobody tied, calc_accuracy_with_ties_for_edit_reward_bench has no ties; VideoAlign's has one at least."""
    label, margin = np.array([1, 1, 1]), np.array([2.0, 1.0, 3.0])
    assert best_threshold(label, margin) == (0.0, 1.0)
    assert accuracy_with_ties(label, margin) == pytest.approx(2 / 3)
