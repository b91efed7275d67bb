"""Rows of public benchmarks: the functions that finish a row of a published schema.

An adapter takes the cells of a published row and the benchmark's groups, and returns the columns to set in the
translated row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from vlmrm.conversation import Image, Message, Part
from vlmrm.errors import RowError
from vlmrm.evaluation.public.rules import Groups
from vlmrm.formats.layout import image_turn, video_turn
from vlmrm.formats.openai import read_reference

SLOT = re.compile(r"<image_\d+>")  # where an image of Multimodal RewardBench 2 stands in its text
VIDEOS = "../media_data"  # of Omni-RewardBench, beside the folders of its tasks
PAIR = re.compile("([A-D])([>=])([A-D])(=.*)?")  # a vote of EditReward-Bench: A>B, C>A, A=B, A=B=Good
RATINGS = range(1, 6)  # of RoboRewardBench, 5 for a task that is done
MM_RLHF_CATEGORIES = ("mcq", "long", "short", "safety", "video")  # the first that is part of the path


def ratings_of(ranks: Any, column: str) -> list[float]:
    """Return ranks, 0 or 1 for the best, as ratings, higher for better."""
    if not isinstance(ranks, (list, tuple)) or not all(isinstance(rank, (int, float)) for rank in ranks):
        raise RowError(f"`{column}` must be a list of numbers, got {ranks!r:.60}")
    return [-float(rank) for rank in ranks]


def labelled(label: Any, column: str, labels: Mapping[str, list[float]]) -> list[float]:
    """Return the ratings that a label stands for."""
    if label not in labels:
        raise RowError(f"`{column}` is {label!r}: it must be one of {', '.join(labels)}")
    return labels[label]


def frames_of(reference: Any, count: int | None) -> Any:
    """Return a folder of frames as `count` of them, evenly spaced, in order of name; anything else as it is."""
    if count is None or not isinstance(reference, str) or not os.path.isdir(reference):
        return reference
    names = sorted(entry.name for entry in os.scandir(reference) if entry.is_file())
    numbers = np.linspace(0, len(names) - 1, count, dtype=int) if names else []
    return [os.path.join(reference, names[number]) for number in numbers]


def vl_rewardbench(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    prefix = re.split("[_-]", str(row["id"]), maxsplit=1)[0].lower()
    return {
        "prompt": row["query"].replace("<image>\n", "").replace("<image>", ""),
        "category": next((name for name, prefixes in groups.items() if prefix in prefixes), "general"),
    }


def multimodal_rewardbench(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    category, row_id = str(row["Category"]), str(row["ID"]).lower()
    if category == "safety":
        return {"category": "safety/bias" if row_id.startswith("pairs") else "safety/toxicity"}
    if category == "reasoning":
        return {"category": "reasoning/math" if row_id.startswith("math") else "reasoning/coding"}
    return {"category": category.removeprefix("open_generation/").removesuffix("_task")}


def mm_rlhf(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    kind = "image" if row.get("image") else "video"
    path = row.get(kind)
    if not path:
        raise RowError("it has neither `image` nor `video`: check the copy")
    return {
        "prompt": row["prompt"].replace("<image>", "").strip(),
        f"{kind}s": [path],
        "category": next((name for name in MM_RLHF_CATEGORIES if name in path), None),
        "question_id": str(row["id"]),
    }


def first_is_better(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    return {"scores": [1.0, 0.0]}


def listed_answers(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Put the lists `chosen` and `rejected` one after the other."""
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise RowError("`chosen` and `rejected` must be lists of answers")
    return {"responses": [*chosen, *rejected], "scores": [1.0] * len(chosen) + [0.0] * len(rejected)}


def rewardbench_2(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    # A prompt with several right answers ("tied:7") and its reference with one ("ref:7") belong together.
    number = str(row["id"]).partition(":")[2]
    unit = f"ties:{number}" if row["subset"].lower() == "ties" else str(row["id"])
    return listed_answers(row, groups) | {"category": row["subset"].lower(), "row": str(row["id"]), "unit": unit}


def rm_bench(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    if (counts := (len(row["chosen"]), len(row["rejected"]))) != (3, 3):
        raise RowError(f"it has {counts[0]} chosen and {counts[1]} rejected answers: each has one of three styles")
    return listed_answers(row, groups) | {"category": row["domain"].partition("-")[0]}


def interleaved(text: str | None, images: Sequence[Any] | None) -> list[Part | str]:
    """Return texts and images in reading order; images without a slot in the text come last."""
    texts = SLOT.split(text or "")
    media = [Image(read_reference(image)) for image in images or ()]
    if len(texts) - 1 > len(media):
        raise RowError(f"its text has {len(texts) - 1} slots for {len(media)} images: check the copy")
    parts: list[Part | str] = [texts[0]]
    for image, after in zip(media, texts[1:], strict=False):
        parts += [image, after]
    parts += media[len(texts) - 1 :]
    return [part for part in parts if not isinstance(part, str) or part.strip()]


def multimodal_rewardbench_2(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    def turn(role: str, part: str) -> Message:
        return Message.of(role, *interleaved(row.get(f"{part}_text"), row.get(f"{part}_images")))

    chosen = str(row["chosen"]).upper()
    if chosen not in ("A", "B"):
        raise RowError(f"`chosen` is {row['chosen']!r}: it must be A or B")
    return {
        "prompt": [turn("user", "prompt")],
        "responses": [turn("assistant", "response_a"), turn("assistant", "response_b")],
        "scores": [1.0, 0.0] if chosen == "A" else [0.0, 1.0],
    }


def editreward_bench(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    first, second = row["comparison_type"].split("vs") if row["dataset"] != "2pair" else ("A", "B")
    vote = PAIR.fullmatch(row["ranking"])
    if vote is None or {vote[1], vote[3]} != {first, second}:
        raise RowError(f"`ranking` is {row['ranking']!r}: it must be a vote on {first} and {second}, such as A>B")
    tied = vote[2] == "="
    row_id = str(row["id"])
    return {
        "scores": [0.0, 0.0] if tied else [float(vote[1] == first), float(vote[1] == second)],
        "source": row_id.split("_")[0] if "_" in row_id else row_id[:10],
    }


def omni_rewardbench(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Read the answers of a task, and its criterion as a system message."""
    task = str(row["config"])
    if task == "text_to_video":
        answers = [video_turn(f"{VIDEOS}/{row[name]}") for name in ("response1", "response2")]
    elif task.endswith(("_to_image", "_to_3D")):
        answers = [image_turn(row[name]) for name in ("response1", "response2")]
    else:
        answers = [row["response1"], row["response2"]]
    media = {"images": [row["image"]]} if "image" in row else {}
    media |= {"videos": [f"{VIDEOS}/{row['video']}"]} if "video" in row else {}
    return {"responses": answers, "question_key": blake2b(row["prompt"].encode(), digest_size=8).hexdigest(), **media}


def roborewardbench(row: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Read the episodes of one task; each of the row's cells is the list of theirs."""
    if wrong := [reward for reward in row["reward"] if reward not in RATINGS]:
        raise RowError(f"`reward` is {wrong[0]!r}: it must be 1, 2, 3, 4 or 5")
    return {"prompt": row["task"][0], "category": _first_folder(row["file_name"][0])}


def _first_folder(path: Any) -> str:
    return str(path).partition("/")[0]


def episodes_of_task(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the list that a row of RoboRewardBench is in: its robot data set and its task."""
    return _first_folder(row["file_name"]), str(row["task"])


Naming = Callable[[Mapping[str, Any]], Hashable]
# Functions that name the list of a row, where the rows of a list are answers to compare.
LISTS: dict[str, Naming] = {naming.__name__: naming for naming in (episodes_of_task,)}

Adapter = Callable[[Mapping[str, Any], Groups], dict[str, Any]]
ADAPTERS: dict[str, Adapter] = {
    adapter.__name__: adapter
    for adapter in (
        *(vl_rewardbench, multimodal_rewardbench, mm_rlhf, first_is_better, rewardbench_2, rm_bench),
        *(multimodal_rewardbench_2, editreward_bench, omni_rewardbench, roborewardbench),
    )
}
