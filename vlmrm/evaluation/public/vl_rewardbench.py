"""VL-RewardBench: pairs of answers about images, in three groups: general, hallucination and reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from vlmrm.evaluation.public.definition import Benchmark, Source, accuracy, by_category, published, ratings_of

# Rows are grouped by the beginning of their id, up to the first _ or -.
GROUPS = {
    "rlaif": "hallucination",
    "rlhf": "hallucination",
    "povid": "hallucination",
    "hallucination": "hallucination",
    "mathverse": "reasoning",
    "mmmu": "reasoning",
}
ALL = ("general", "hallucination", "reasoning")


def _translate(row: Mapping[str, Any]) -> dict[str, Any]:
    prefix = re.split("[_-]", str(row["id"]), maxsplit=1)[0].lower()
    return {
        "prompt": row["query"].replace("<image>\n", "").replace("<image>", ""),
        "images": [row["image"]],
        "responses": row["response"],
        "scores": ratings_of(row["human_ranking"], "human_ranking"),
        "category": GROUPS.get(prefix, "general"),
    }


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    groups = by_category(frame)
    macro = {"macro": sum(groups.values()) / len(ALL)} if set(groups) == set(ALL) else {}
    return {"overall": accuracy(frame), **macro, **groups}


VL_REWARDBENCH = Benchmark(
    name="vl-rewardbench",
    title="VL-RewardBench",
    source=Source("MMInstruction/VL-RewardBench", ("test",)),
    required=("id", "query", "response", "image", "human_ranking"),
    translate=_translate,
    rule=_rule,
    published=[
        *published(
            "BaseReward paper, tables 8 to 10",
            ("overall", "macro"),
            {
                "BaseReward, two models": (84.41, 82.91),
                "BaseReward (Qwen2.5-VL-7B)": (82.16, 80.85),
                "BaseReward (Qwen2-VL-7B)": (78.53, 76.53),
                "R1-Reward (Qwen2.5-VL-7B)": (71.92, 71.44),
                "Gemini-1.5-Pro": (67.2, 62.5),
                "Claude-3.7-Sonnet": (66.3, 66.5),
                "GPT-4o": (65.8, 62.4),
                "IXC-2.5-Reward": (65.8, 70.0),
                "MM-RLHF-Reward": (50.15, 51.01),
                "Qwen2.5-VL-7B-Instruct": (48.0, 49.5),
            },
        ),
        *published("Skywork-VL-Reward model card", ("overall",), {"Skywork-VL-Reward (Qwen2.5-VL-7B)": (73.1,)}),
    ],
    verified="Schema: the data card. Rule and groups: the authors' cal.py, with one vote, which is all that a scalar "
    "model has. An earlier state of cal.py took the rows from POVID for general instead of hallucination; how their "
    "ids begin (`povid` or `hallucination`) could not be checked against the data, so both are taken.",
)
