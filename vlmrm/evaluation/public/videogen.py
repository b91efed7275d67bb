"""VideoGen-RewardBench: two videos for a prompt, judged overall and for visual quality, motion and alignment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.errors import RowError
from vlmrm.evaluation.public.definition import (
    Benchmark,
    Source,
    accuracy_with_ties,
    accuracy_without_ties,
    margins,
    published,
    video,
)

LABELS = {"A": (1.0, 0.0), "B": (0.0, 1.0), "same": (0.0, 0.0)}
SIGN = {"A": 1, "B": -1, "same": 0}
DIMENSIONS = ("VQ", "MQ", "TA")
METRICS = [f"{name}{suffix}" for suffix in ("", "_with_ties") for name in ("overall", "vq", "mq", "ta")]


def _translate(row: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("Overall", *DIMENSIONS):
        if row[name] not in LABELS:
            raise RowError(f"`{name}` is {row[name]!r}: it must be A, B or same")
    return {
        "prompt": row["prompt"],
        "responses": [video(row["path_A"]), video(row["path_B"])],
        "scores": list(LABELS[row["Overall"]]),
        **{name: row[name] for name in DIMENSIONS},
    }


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    # The chosen of a pair is A or B: margins and labels are turned to A's side.
    side = np.where(frame["chosen_branch"] == 0, 1, -1)
    margin = margins(frame).to_numpy() * side
    labels = {"overall": np.where(frame["tie"].astype(bool), 0, side)}
    labels |= {name.lower(): frame[f"by/{name}"].map(SIGN).to_numpy() for name in DIMENSIONS}
    return {
        **{name: accuracy_without_ties(label, margin) for name, label in labels.items()},
        **{f"{name}_with_ties": accuracy_with_ties(label, margin) for name, label in labels.items()},
    }


VIDEOGEN_REWARDBENCH = Benchmark(
    name="videogen-rewardbench",
    title="VideoGen-RewardBench",
    source=Source(
        "KwaiVGI/VideoGen-RewardBench",
        ("eval",),
        file="videogen-rewardbench.csv",
        fetch="get it with `hf download KwaiVGI/VideoGen-RewardBench --repo-type dataset --local-dir FOLDER`, unpack "
        "videos.zip there, and give FOLDER",
    ),
    required=("path_A", "path_B", "prompt", "Overall", *DIMENSIONS),
    translate=_translate,
    rule=_rule,
    columns=DIMENSIONS,
    published=published(
        "VideoGen-RewardBench leaderboard, February 2025",
        METRICS,
        {
            "VideoReward (Qwen2-VL-2B)": (73.59, 75.66, 74.70, 72.20, 61.26, 59.68, 66.03, 53.80),
            "VisionReward": (67.59, 59.03, 60.98, 61.15, 56.77, 47.43, 59.03, 46.56),
            "LiFT": (57.26, 55.97, 54.91, 55.43, 39.08, 47.53, 59.04, 33.79),
            "chance": (50.30, 49.86, 49.64, 50.40, 41.86, 47.42, 59.07, 37.25),
            "VideoScore": (50.22, 47.72, 51.09, 50.34, 41.80, 47.41, 59.05, 37.24),
        },
    ),
    verified="Schema: the authors' evaluation script and readers by others. Rule: the authors' calc_accuracy.py. A "
    "model with one score is compared by it on all four labels, where VideoReward has a score for each. The script's "
    "label for `overall` is called ALL, readers of the published table call it Overall, and so does this one. The "
    "models of the leaderboard's rows were told apart by copies of the paper's table. The data itself was not seen.",
)
