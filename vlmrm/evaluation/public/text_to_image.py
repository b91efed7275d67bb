"""HPDv2, HPDv3 and the ImageReward test set: images for a prompt, ranked by people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from vlmrm.evaluation.public.definition import (
    Benchmark,
    Source,
    accuracy,
    margins,
    picture,
    preferences,
    published,
    ratings_of,
)

HPSV2_README = "README of HPSv2"
HPSV3_PAPER = "HPSv3 paper (arXiv 2508.03789), second-hand"


def _ranked(row: Mapping[str, Any], images: list[Any], ranks: str) -> dict[str, Any]:
    return {
        "prompt": row["prompt"],
        "responses": [picture(image) for image in images],
        "scores": ratings_of(row[ranks], ranks),
    }


def _translate_hpdv2(row: Mapping[str, Any]) -> dict[str, Any]:
    return _ranked(row, [f"test/{name}" for name in row["image_path"]], "rank")


def _rule_hpdv2(frame: pd.DataFrame) -> dict[str, float]:
    """1 minus the share of a prompt's pairs that are the wrong way round, averaged over prompts."""
    right = frame["tie"].astype(bool) | (margins(frame) > 0)
    return {"accuracy": right.groupby(frame["comparison_id"]).mean().mean()}


HPDV2 = Benchmark(
    name="hpdv2",
    title="the HPDv2 test set",
    source=Source(
        "ymhao/HPDv2",
        ("test",),
        file="test.json",
        fetch="get test.json and test.tar.gz with `hf download ymhao/HPDv2 test.json test.tar.gz --repo-type dataset "
        "--local-dir FOLDER`, unpack the archive to FOLDER/test, and give FOLDER",
    ),
    required=("prompt", "image_path", "rank"),
    translate=_translate_hpdv2,
    rule=_rule_hpdv2,
    published=[
        *published(HPSV3_PAPER, ("accuracy",), {"HPSv3": (85.4,)}),
        *published(
            HPSV2_README,
            ("accuracy",),
            {
                "HPS v2.1": (84.1,),
                "HPS v2": (83.3,),
                "PickScore": (79.8,),
                "one person": (78.1,),
                "HPS": (77.6,),
                "Aesthetic Score Predictor": (76.8,),
                "ImageReward": (74.0,),
            },
        ),
    ],
    verified="Schema: the README of HPSv2. Rule: inversion_score in the authors' training code: a pair that people "
    "tied is never wrong. The authors let the order in the file decide between equal scores; here they are wrong. "
    "That lower ranks are better follows from the rule; the folder inside the archive was not checked.",
)


def _translate_hpdv3(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("prompt", "path1", "path2")}


def _rule_hpdv3(frame: pd.DataFrame) -> dict[str, float]:
    return {"accuracy": accuracy(frame)}


HPDV3 = Benchmark(
    name="hpdv3",
    title="the HPDv3 test set",
    source=Source(
        "MizzenAI/HPDv3",
        ("test",),
        file="test.json",
        fetch="get it with `hf download MizzenAI/HPDv3 --repo-type dataset --local-dir FOLDER`, unpack its images as "
        "its card says (`cat images.tar.gz.* | gunzip | tar -xv`), and give FOLDER",
    ),
    required=("prompt", "path1", "path2"),
    translate=_translate_hpdv3,
    rule=_rule_hpdv3,
    published=published(HPSV3_PAPER, ("accuracy",), {"HPSv3": (76.9,), "ImageReward": (58.6,)}),
    verified="Schema: readers of the data set by others (`path1` is the preferred image), not the data itself. Rule: "
    "the share of pairs whose preferred image scores higher; the authors' evaluation code was not read. Users of "
    "HPSv3 re-measure 76.0 to 76.1 where the paper has 76.9.",
)


def _translate_image_reward(row: Mapping[str, Any]) -> dict[str, Any]:
    images = [f"test_images/{name}" for name in row["generations"]]
    return {"id": row["id"], **_ranked(row, images, "ranking")}


def _rule_image_reward(frame: pd.DataFrame) -> dict[str, float]:
    pairs = preferences(frame)
    by_prompt = (margins(pairs) > 0).groupby(pairs["comparison_id"]).mean().mean()
    return {"accuracy": accuracy(pairs), "accuracy_by_prompt": by_prompt}


IMAGE_REWARD = Benchmark(
    name="imagereward",
    title="the ImageReward test set",
    source=Source(
        "THUDM/ImageReward",
        ("test",),
        file="test.json",
        fetch="clone github.com/THUDM/ImageReward, unpack test_images.zip of the hub's model repository "
        "THUDM/ImageReward to data/test_images, and give the folder `data`",
    ),
    required=("id", "prompt", "generations", "ranking"),
    translate=_translate_image_reward,
    rule=_rule_image_reward,
    published=[
        *published(HPSV3_PAPER, ("accuracy_by_prompt",), {"HPSv3": (66.8,)}),
        *published(
            HPSV2_README,
            ("accuracy_by_prompt",),
            {
                "HPS v2.1": (66.8,),
                "HPS v2": (65.7,),
                "one person": (65.3,),
                "ImageReward": (65.1,),
                "PickScore": (62.9,),
                "HPS": (61.2,),
                "Aesthetic Score Predictor": (57.4,),
            },
        ),
    ],
    verified="Schema: data/test.json of the authors. Rule: their test.py: `accuracy` is over the pairs of all "
    "prompts, without those that people tied. HPSv2's code averages prompts instead: `accuracy_by_prompt`. Which of "
    "the two the HPSv3 paper used could not be checked; its figure stands under HPSv2's.",
)
