"""Multimodal RewardBench: pairs of answers about images, from open questions and knowledge to reasoning and safety."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from vlmrm.errors import RowError
from vlmrm.evaluation.public.definition import Benchmark, Source, accuracy, by_category, published


def _translate(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["Better"] not in ("Output1", "Output2"):
        raise RowError(f"`Better` is {row['Better']!r}: it must be Output1 or Output2")
    return {
        "id": row["ID"],
        "prompt": row["Text"],
        "images": [row["Image"]],
        "responses": [row["Output1"], row["Output2"]],
        "scores": [float(row["Better"] == "Output1"), float(row["Better"] == "Output2")],
        "category": _category(str(row["Category"]), str(row["ID"]).lower()),
    }


def _category(category: str, row_id: str) -> str:
    if category == "safety":
        return "safety/bias" if row_id.startswith("pairs") else "safety/toxicity"
    if category == "reasoning":
        return "reasoning/math" if row_id.startswith("math") else "reasoning/coding"
    return category.removeprefix("open_generation/").removesuffix("_task")


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    return {"overall": accuracy(frame), **by_category(frame)}


MULTIMODAL_REWARDBENCH = Benchmark(
    name="multimodal-rewardbench",
    title="Multimodal RewardBench",
    source=Source(
        "github.com/facebookresearch/multimodal_rewardbench",
        ("test",),
        file="all_data.json",
        fetch="clone github.com/facebookresearch/multimodal_rewardbench, run its scripts/0_download_data.py, and give "
        "its folder `data`",
    ),
    required=("ID", "Text", "Image", "Output1", "Output2", "Better", "Category"),
    translate=_translate,
    rule=_rule,
    published=[
        *published(
            "the benchmark's README",
            ("overall", "correctness", "preference", "knowledge", "vqa"),
            {
                "Claude 3.5 Sonnet": (72.0, 62.6, 67.8, 73.9, 85.6),
                "Gemini 1.5 Pro": (72.0, 63.5, 67.7, 66.3, 87.2),
                "GPT-4o": (71.5, 62.6, 69.0, 72.0, 87.2),
                "Llama-3.2-90B-Vision-Instruct": (62.4, 60.0, 68.4, 61.2, 77.1),
                "Llama-3.2-11B-Vision-Instruct": (52.4, 57.8, 65.8, 55.5, 55.8),
            },
        ),
        *published(
            "BaseReward paper, tables 8 to 10",
            ("overall",),
            {
                "R1-Reward (Qwen2.5-VL-7B)": (82.2,),
                "BaseReward, two models": (73.6,),
                "BaseReward (Qwen2.5-VL-7B)": (72.8,),
                "BaseReward (Qwen2-VL-7B)": (68.7,),
                "MM-RLHF-Reward": (67.1,),
                "IXC-2.5-Reward": (66.6,),
            },
        ),
    ],
    verified="Schema: the README and the judging script. Rule: the authors' 2_get_accuracy.py; `overall` is the share "
    "of all rows. The README's figures include Hateful Memes, which the authors may not distribute: `overall` and "
    "`safety/toxicity` of a public copy are over fewer rows. The names of the categories knowledge and vqa could not "
    "be checked against the data.",
)
