"""Example pairs: the most confident mistakes and the narrowest wins, with thumbnails and texts."""

from __future__ import annotations

import base64
import io
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from vlmrm.data.media import open_image
from vlmrm.errors import RowError
from vlmrm.evaluation.report.checkpoints import Checkpoint

logger = logging.getLogger("vlmrm")
SIDE = 320  # pixels, the longer one
COUNT = 12
IMAGES = 4  # of one prompt or answer


@dataclass(frozen=True)
class Picture:
    """An image as a data URI, None where it cannot be opened."""

    alt: str
    uri: str | None


@dataclass(frozen=True)
class ShownAnswer:
    """One of the two answers of a pair."""

    role: str
    score: float
    text: str
    pictures: list[Picture]


@dataclass(frozen=True)
class Example:
    """A pair: the prompt, and both answers with their scores."""

    id: str
    category: str | None
    margin: float
    prompt: str
    pictures: list[Picture]
    more_images: int
    answers: list[ShownAnswer]


@dataclass(frozen=True)
class Gallery:
    """Examples under a heading and a sentence, which says so if there are none."""

    id: str
    title: str
    text: str
    examples: list[Example]


def galleries(best: Checkpoint) -> list[Gallery]:
    """Return the pairs with the lowest margins below zero, and the lowest above; at most one of each prompt."""
    order = np.argsort(best.margins, kind="stable")
    wrong, right = order[best.margins[order] < 0], order[best.margins[order] > 0]
    mistakes = "At most one pair a prompt. A confident mistake is often a wrong label: look before blaming the model."
    wins = "At most one pair a prompt. Little would turn these round."
    return [
        Gallery(
            "mistakes",
            "The most confident mistakes",
            mistakes if len(wrong) else "No pair is ranked the wrong way.",
            _examples(best, wrong),
        ),
        Gallery(
            "wins",
            "The narrowest wins",
            wins if len(right) else "No pair is ranked the right way.",
            _examples(best, right),
        ),
    ]


def _examples(best: Checkpoint, order: np.ndarray) -> list[Example]:
    repeated = best.pairs["prompt_id"].iloc[order].duplicated().to_numpy()
    rows = best.pairs.iloc[order[~repeated][:COUNT]]
    return [_example(row) for row in rows.to_dict("records")]


def _example(row: dict[str, Any]) -> Example:
    images = paths_of(row.get("image_paths"))
    category = row.get("category")
    answers = [
        ShownAnswer(
            side,
            float(row[f"{side}_score"]),
            row.get(f"{side}_text") or "",
            _pictures(paths_of(row.get(f"{side}_image_paths")), f"image of the {side} answer"),
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


def paths_of(value: Any) -> list[str]:
    """Return a cell with a list, which is an array after parquet, and None or NaN where the data have none."""
    return [] if value is None or isinstance(value, float) else [str(path) for path in value]


def _pictures(paths: list[str], alt: str) -> list[Picture]:
    numbered = len(paths) > 1
    return [
        Picture(f"{alt} {number}" if numbered else alt, thumbnail(path))
        for number, path in enumerate(paths[:IMAGES], start=1)
    ]


@cache
def thumbnail(path: str) -> str | None:
    """Return a JPEG of at most 320 x 320 pixels as a data URI; None if it cannot be opened."""
    try:
        image = open_image(path)
    except RowError as error:
        logger.debug("The report lacks the image %s: %s", path, error)
        return None
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=78, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
