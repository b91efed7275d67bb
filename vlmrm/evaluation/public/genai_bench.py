"""GenAI-Bench: votes of people on generated images, edited images and generated videos: three benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

from vlmrm.errors import RowError
from vlmrm.evaluation.public.definition import Benchmark, Source, accuracy, margins, picture, published, video

VOTES = {"leftvote": (1.0, 0.0), "rightvote": (0.0, 1.0), "tievote": (0.0, 0.0), "bothbad_vote": (0.0, 0.0)}
README = "README of GenAI-Bench, July 2024"
VERIFIED = (
    "Schema: the authors' inference_configs.json and inference.py. Rule: their parse_response; `accuracy` is over all "
    "votes. A scalar model cannot say that both are good or both bad, so a vote for either is right only when the "
    "scores are equal; `accuracy_without_ties` leaves such votes out, as others report it. Not checked against the "
    "data: the split's name, `test`, which readers by others use (the authors' first release called it train)."
)


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
    right = (margins(frame) > 0).where(~frame["tie"].astype(bool), margins(frame) == 0)
    return {"accuracy": right.mean(), "accuracy_without_ties": accuracy(frame)}


_benchmark = partial(Benchmark, rule=_rule)

GENAI_BENCH_IMAGE = _benchmark(
    name="genai-bench-image",
    title="GenAI-Bench, image generation",
    source=Source("TIGER-Lab/GenAI-Bench", ("test",), config="image_generation"),
    required=("prompt", "left_image", "right_image", "vote_type"),
    translate=_generated,
    published=published(
        README,
        ("accuracy",),
        {"Idefics2": (42.2478,), "Qwen-VL": (26.6282,), "BLIP-2": (26.3401,), "chance": (25.3602,)},
    ),
    verified=VERIFIED,
)
GENAI_BENCH_EDIT = _benchmark(
    name="genai-bench-edit",
    title="GenAI-Bench, image editing",
    source=Source("TIGER-Lab/GenAI-Bench", ("test",), config="image_edition"),
    required=("instruct_prompt", "source_image", "left_output_image", "right_output_image", "vote_type"),
    translate=_edited,
    published=[
        *published(
            README,
            ("accuracy",),
            {"Idefics2": (27.3123,), "BLIP-2": (26.0065,), "chance": (25.8977,), "Qwen-VL": (14.9075,)},
        ),
        *published(
            "README of EditReward (its rule for ties is not known to be this one)",
            ("accuracy_without_ties",),
            {"EditReward (MiMo-VL-7B)": (65.72,), "EditReward (Qwen2.5-VL-7B)": (63.97,)},
        ),
    ],
    verified=f"{VERIFIED} The authors also show their judges a description of both pictures; here the question is the "
    "source picture with the instruction.",
)
GENAI_BENCH_VIDEO = _benchmark(
    name="genai-bench-video",
    title="GenAI-Bench, video generation",
    source=Source(
        "TIGER-Lab/GenAI-Bench",
        ("test",),
        config="video_generation",
        fetch="get it with `hf download TIGER-Lab/GenAI-Bench --repo-type dataset --local-dir FOLDER`, download the "
        "videos that its rows link to, and point path_rewrites from the links to their folder",
    ),
    required=("prompt", "left_video", "right_video", "vote_type"),
    translate=_filmed,
    published=published(README, ("accuracy",), {"chance": (25.1637,), "BLIP-2": (16.9317,)}),
    verified=VERIFIED,
)
