"""Single pairs worth looking at: the most confident mistakes and the narrowest wins, with images and texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrm.evaluation.report.checkpoints import Checkpoint
from vlmrm.evaluation.report.thumbnails import thumbnail

COUNT = 12
IMAGES = 4  # of one prompt or answer


@dataclass(frozen=True)
class Picture:
    """An image as a data URI, None where it cannot be opened."""

    alt: str
    uri: str | None


@dataclass(frozen=True)
class Answer:
    """One of the two answers of a pair."""

    role: str
    score: float
    text: str
    pictures: list[Picture]


@dataclass(frozen=True)
class Example:
    """A pair: what was asked, and both answers with their scores."""

    id: str
    category: str | None
    margin: float
    prompt: str
    pictures: list[Picture]
    more_images: int
    answers: list[Answer]


@dataclass(frozen=True)
class Gallery:
    """Examples under one heading; `empty` is said where there are none."""

    id: str
    title: str
    empty: str
    examples: list[Example]


def galleries(best: Checkpoint) -> list[Gallery]:
    """The pairs most wrong, the worst first, and those right by least; of each prompt at most one."""
    order = np.argsort(best.margins, kind="stable")
    wrong, right = order[best.margins[order] < 0], order[best.margins[order] > 0]
    return [
        Gallery("mistakes", "The most confident mistakes", "No pair is ranked the wrong way.", _examples(best, wrong)),
        Gallery("wins", "The narrowest wins", "No pair is ranked the right way.", _examples(best, right)),
    ]


def _examples(best: Checkpoint, order: np.ndarray) -> list[Example]:
    some = best.pairs.iloc[order].drop_duplicates("prompt_id").head(COUNT)
    return [_example(row) for row in some.to_dict("records")]


def _example(row: dict[str, Any]) -> Example:
    images = _paths(row, "image_paths")
    category = row.get("category")
    answers = [
        Answer(
            side,
            float(row[f"{side}_score"]),
            row.get(f"{side}_text") or "",
            _pictures(_paths(row, f"{side}_image_paths"), f"image of the {side} answer"),
        )
        for side in ("chosen", "rejected")
    ]
    return Example(
        id=str(row["comparison_id"]),
        category=category if isinstance(category, str) else None,
        margin=answers[0].score - answers[1].score,
        prompt=row.get("prompt_text") or "",
        pictures=_pictures(images, "image of the prompt"),
        more_images=max(len(images) - IMAGES, 0),
        answers=answers,
    )


def _paths(row: dict[str, Any], column: str) -> list[str]:
    """A list column is an array after parquet, and absent where the data have none."""
    value = row.get(column)
    return [] if value is None or isinstance(value, float) else [str(path) for path in value]


def _pictures(paths: list[str], alt: str) -> list[Picture]:
    numbered = len(paths) > 1
    return [
        Picture(f"{alt} {number}" if numbered else alt, thumbnail(path))
        for number, path in enumerate(paths[:IMAGES], start=1)
    ]
