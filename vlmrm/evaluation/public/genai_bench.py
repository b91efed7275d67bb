"""GenAI-Bench: votes of people on generated images, edited images and generated videos: three benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

from vlmrm.errors import RowError
from vlmrm.evaluation.public.definition import (
    Benchmark,
    Published,
    Source,
    accuracy,
    accuracy_with_ties,
    margins,
    picture,
    published,
    video,
)

VOTES = {"leftvote": (1.0, 0.0), "rightvote": (0.0, 1.0), "tievote": (0.0, 0.0), "bothbad_vote": (0.0, 0.0)}
SPLIT = "test_v1"  # of the authors' inference.py and table: 1,735 votes on images, 919 on edits, 1,069 on videos
VERIFIED = (
    "Schema: the authors' inference_configs.json. Split and rule: their inference.py; `accuracy` is over all votes. "
    "A scalar model cannot say that both are good or both bad, so a vote for either is right only when the scores are "
    "equal: it loses nearly every such vote, 25 % of those on images, 45 % on edits and 35 % on videos, where a judge "
    "with four verdicts does not. `accuracy_without_ties` leaves such votes out, and is above what the same model has "
    "on all; `accuracy_with_ties` counts margins up to a threshold as ties, the threshold that is best on these very "
    "votes (arXiv 2305.14324). Each published figure stands under its own rule, and the three cannot be compared with "
    "each other. Not checked: the data itself."
)
# Of judges that answer A>B, B>A, both good or both bad, on all votes.
LEADERBOARD = "README of GenAI-Bench, August 2024: four verdicts, all votes"
JUDGES = {
    "GPT-4o": (45.59, 53.54, 48.46),
    "Gemini-1.5-Pro": (44.67, 55.93, 46.21),
    "Idefics2": (42.25, 27.31, 16.46),
    "MiniCPM-V-2.5": (37.81, 25.24, 6.55),
    "Video-LLaVA": (37.75, 26.66, None),
    "LLaVA": (37.0, 26.12, 30.4),
    "CogVLM": (29.34, None, 24.6),
    "Qwen-VL": (26.63, 14.91, 2.15),
    "BLIP-2": (26.34, 26.01, 16.93),
    "chance": (25.36, 25.9, 25.16),
    "LLaVA-NeXT": (22.65, 25.35, 21.7),
}


def _judges(task: int) -> list[Published]:
    """The leaderboard's column of one of the tasks; the zeros of models that answered nothing are left out."""
    return published(LEADERBOARD, ("accuracy",), {model: (shares[task],) for model, shares in JUDGES.items()})


def _votes(row: Mapping[str, Any]) -> list[float]:
    if row["vote_type"] not in VOTES:
        raise RowError(f"`vote_type` is {row['vote_type']!r}: it must be one of {', '.join(VOTES)}")
    return list(VOTES[row["vote_type"]])


def _generated(row: Mapping[str, Any]) -> dict[str, Any]:
    responses = [picture(row["left_image"]), picture(row["right_image"])]
    return {"prompt": row["prompt"], "responses": responses, "scores": _votes(row)}


def _edited(row: Mapping[str, Any]) -> dict[str, Any]:
    responses = [picture(row["left_output_image"]), picture(row["right_output_image"])]
    asked = {"prompt": row["instruct_prompt"], "images": [row["source_image"]]}
    return {**asked, "responses": responses, "scores": _votes(row)}


def _filmed(row: Mapping[str, Any]) -> dict[str, Any]:
    responses = [video(row["left_video"]), video(row["right_video"])]
    return {"prompt": row["prompt"], "responses": responses, "scores": _votes(row)}


def _rule(frame: pd.DataFrame) -> dict[str, float]:
    margin, tied = margins(frame), frame["tie"].astype(bool)
    return {
        "accuracy": (margin > 0).where(~tied, margin == 0).mean(),
        "accuracy_with_ties": accuracy_with_ties((~tied).to_numpy(int), margin.to_numpy()),
        "accuracy_without_ties": accuracy(frame),
    }


_benchmark = partial(Benchmark, rule=_rule)

GENAI_BENCH_IMAGE = _benchmark(
    name="genai-bench-image",
    title="GenAI-Bench, image generation",
    source=Source("TIGER-Lab/GenAI-Bench", (SPLIT,), config="image_generation"),
    required=("prompt", "left_image", "right_image", "vote_type"),
    translate=_generated,
    published=_judges(0),
    verified=VERIFIED,
)
GENAI_BENCH_EDIT = _benchmark(
    name="genai-bench-edit",
    title="GenAI-Bench, image editing",
    source=Source("TIGER-Lab/GenAI-Bench", (SPLIT,), config="image_edition"),
    required=("instruct_prompt", "source_image", "left_output_image", "right_output_image", "vote_type"),
    translate=_edited,
    published=[
        *_judges(1),
        *published(
            "README of EditReward: best threshold, all votes",
            ("accuracy_with_ties",),
            {"EditReward (MiMo-VL-7B)": (65.72,), "EditReward (Qwen2.5-VL-7B)": (63.97,)},
        ),
    ],
    verified=f"{VERIFIED} The authors also show their judges a description of both pictures; here the question is the "
    "source picture with the instruction. EditReward's eval_bench.py calls the accuracy with ties the paper's metric; "
    "its own copy of the votes was not seen.",
)
GENAI_BENCH_VIDEO = _benchmark(
    name="genai-bench-video",
    title="GenAI-Bench, video generation",
    source=Source(
        "TIGER-Lab/GenAI-Bench",
        (SPLIT,),
        config="video_generation",
        fetch="get it with `hf download TIGER-Lab/GenAI-Bench --repo-type dataset --local-dir FOLDER`, download the "
        "videos that its rows link to, and point path_rewrites from the links to their folder",
    ),
    required=("prompt", "left_video", "right_video", "vote_type"),
    translate=_filmed,
    published=_judges(2),
    verified=VERIFIED,
)
