"""RewardBench (the first, text only): 23 subsets in four sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from vlmrm.evaluation.public.definition import Benchmark, Source, by_category, published

# Subsets with the authors' weights: their numbers of rows, but math-prm (447) as heavy as all of the code.
SECTIONS = {
    "chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "chat_hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "reasoning": {
        "math-prm": 984,
        **dict.fromkeys(("hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust"), 164),
    },
}


def _translate(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: row[name] for name in ("prompt", "chosen", "rejected")}, "category": row["subset"]}


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    subsets = by_category(frame)
    sections = {}
    for section, weights in SECTIONS.items():
        there = {name: weight for name, weight in weights.items() if name in subsets}
        if there:
            weighted = sum(subsets[name] * weight for name, weight in there.items())
            sections[section] = weighted / sum(there.values())
    overall = {"overall": sum(sections.values()) / len(SECTIONS)} if len(sections) == len(SECTIONS) else {}
    return {**overall, **sections, **subsets}


REWARDBENCH = Benchmark(
    name="rewardbench",
    title="RewardBench",
    source=Source("allenai/reward-bench", ("filtered",)),
    required=("prompt", "chosen", "rejected", "subset"),
    translate=_translate,
    rule=_rule,
    published=published(
        "RewardBench leaderboard of January 2025, in the card of RLHFlow/Decision-Tree-Reward-Gemma-2-27B",
        ("overall", "chat", "chat_hard", "safety", "reasoning"),
        {
            "Decision-Tree-Reward-Gemma-2-27B": (95.3, 96.9, 91.4, 93.7, 99.1),
            "INF-ORM-Llama3.1-70B": (95.1, 96.6, 91.0, 93.6, 99.1),
            "Skywork-Reward-Gemma-2-27B-v0.2": (94.3, 96.1, 89.9, 93.0, 98.1),
            "Llama-3.1-Nemotron-70B-Reward": (94.1, 97.5, 85.7, 95.1, 98.1),
            "Skywork-Reward-Llama-3.1-8B-v0.2": (93.1, 94.7, 88.4, 92.7, 96.7),
        },
    ),
    verified="Schema: the data card. Rule: the sections and weights of the authors' constants.py, as it is since "
    "September 2024 (xstest-should-refuse 154, xstest-should-respond 250), and their strict comparison in run_rm.py. "
    "`overall` is the mean of the four sections; the prior test sets, a fifth section of the first leaderboard, are "
    "another data set and left out, as the published figures here do.",
)
