"""MM-RLHF-RewardBench: pairs of answers about images and videos, several pairs a question."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from vlmrm.errors import RowError
from vlmrm.evaluation.public.definition import Benchmark, Source, accuracy, margins, preferences, published

CATEGORIES = ("mcq", "long", "short", "safety", "video")  # the first that is part of the path
FRAMES = 32


def _translate(row: Mapping[str, Any]) -> dict[str, Any]:
    kind = "image" if row.get("image") else "video"
    path = row.get(kind)
    if not path:
        raise RowError("it has neither `image` nor `video`: check the copy")
    return {
        "prompt": row["prompt"].replace("<image>", "").strip(),
        f"{kind}s": [path],
        "chosen": row["chosen"],
        "rejected": row["rejected"],
        "category": next((name for name in CATEGORIES if name in path), None),
        "question_id": str(row["id"]),
    }


def frames_of(reference: Any) -> Any:
    """A folder of frames as 32 of them, evenly spaced, in order of name; anything else as it is."""
    if not isinstance(reference, str) or not os.path.isdir(reference):
        return reference
    names = sorted(entry.name for entry in os.scandir(reference) if entry.is_file())
    places = np.linspace(0, len(names) - 1, FRAMES, dtype=int) if names else []
    return [os.path.join(reference, names[place]) for place in places]


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    parts = {"": frame} | {f"{name}/": rows for name, rows in frame.groupby("category")}
    figures = {}
    for name, rows in parts.items():
        right = margins(preferences(rows)) > 0
        figures[f"{name}acc"] = accuracy(rows)
        figures[f"{name}acc_plus"] = float(right.groupby(preferences(rows)["by/question_id"]).all().mean())
    return figures


MM_RLHF_REWARDBENCH = Benchmark(
    name="mm-rlhf-rewardbench",
    title="MM-RLHF-RewardBench",
    source=Source(
        "yifanzhang114/MM-RLHF-RewardBench",
        ("test",),
        file="mm_reward_bench.jsonl",
        fetch="get it with `hf download yifanzhang114/MM-RLHF-RewardBench --repo-type dataset --local-dir FOLDER`, "
        "unpack its images and videos there, and give that folder",
    ),
    required=("id", "prompt", "chosen", "rejected"),
    translate=_translate,
    rule=_rule,
    columns=("question_id",),
    expand=frames_of,
    published=[
        *published(
            "BaseReward paper, tables 8 to 10",
            ("acc", "acc_plus"),
            {
                "BaseReward, two models": (92.94, 80.43),
                "BaseReward (Qwen2.5-VL-7B)": (91.76, 80.43),
                "BaseReward (Qwen2-VL-7B)": (90.59, 78.26),
                "Claude-3.7-Sonnet": (82.4, None),
                "MM-RLHF-Reward": (82.0, 63.0),
                "R1-Reward (Qwen2.5-VL-7B)": (80.59, 54.35),
                "IXC-2.5-Reward": (71.18, 50.0),
                "GPT-4o": (58.2, None),
            },
        )
    ],
    verified="Schema and rule: the authors' eval_mm_reward_bench.py and cal_performance_mmreweard_bench.py, as a copy "
    "of their repository has them. Not checked against the data: the layout of the archives, and whether a video is a "
    "folder of frames (as the script reads it) or a file; both are read.",
)
