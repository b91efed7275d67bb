"""Label Studio's JSON.

A tool's task has its texts and media in one column and what people answered in another. Annotations that were
cancelled or not submitted are none; several are raters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmrm.conversation import shorten
from vlmrm.errors import RowError
from vlmrm.formats.layout import MEDIA, ParsedRow, Row, image_turn, layout, records, video_turn
from vlmrm.formats.preferences import read_pair
from vlmrm.formats.verdicts import IMAGES, PROMPTS, TEXTS, VIDEOS, Sides, media_pair, read_word, suffix_of, with_raters

TEMPLATES = [("text1", "text2"), ("text_1", "text_2"), ("text_a", "text_b"), ("left", "right")]


@layout("Label Studio", ["data", "annotations"], without=["rejected"])
def label_studio(row: Row) -> ParsedRow:
    fields = _fields(row["data"], "data")
    annotations = [it for it in records(row["annotations"], "annotations") if not it.get("was_cancelled")]
    results = [records(annotation.get("result") or [], "result") for annotation in annotations]
    pairwise = next((r.get("to_name") for result in results for r in result if r.get("type") == "pairwise"), None)
    sides = _sides(fields, str(pairwise).split(",") if pairwise else ())
    parsed = _task(fields, sides)
    try:
        verdicts = [verdict for result in results if (verdict := _verdict(result, fields, sides)) is not None]
        kind = "rating" if any(set(verdict) - {0.0, 1.0} for verdict in verdicts) else "preference"
        return with_raters(replace(parsed, kind=kind), verdicts)
    except RowError as error:
        return replace(parsed, unjudged=error.reason)


def _verdict(result: Sequence[Mapping[str, Any]], fields: Row, sides: Sides) -> tuple[float, float] | None:
    """Return what one annotation says of the two answers; None if it has no result about them."""
    of_type = {kind: [it for it in result if it.get("type") == kind] for kind in ("pairwise", "rating", "choices")}
    if pairwise := of_type["pairwise"]:
        if not all(it.get("to_name") for it in pairwise):
            raise RowError("its pairwise result has no `to_name`, which says which answer was on the left")
        selected = {(it.get("value") or {}).get("selected") for it in pairwise}
        if len(selected) != 1:
            raise RowError(f"its {len(pairwise)} pairwise results differ, which may be of several questions")
        return read_word(fields, "selected", selected.pop(), sides)
    if ratings := of_type["rating"]:
        values: dict[str | None, Any] = {
            _meant(str(it.get("to_name")), sides): (it.get("value") or {}).get("rating") for it in ratings
        }
        if len(ratings) != 2 or values.keys() != set(sides):
            raise RowError(f"its ratings are not of `{sides[0]}` and `{sides[1]}`, one each")
        return values[sides[0]], values[sides[1]]
    choices = [choice for it in of_type["choices"] for choice in (it.get("value") or {}).get("choices", [])]
    return read_word(fields, "choices", choices[0], sides) if len(choices) == 1 else None


def _sides(fields: Row, tags: Sequence[str]) -> Sides:
    """Return the fields of the two answers; `tags` name what was compared side by side, the left object first."""
    if len(tags) == 2 and all(tag in fields for tag in tags):
        return tags[0], tags[1]
    sides = next((pair for pair in (*TEXTS, *IMAGES, *VIDEOS, *TEMPLATES) if set(pair) <= fields.keys()), None)
    if sides is None:
        raise RowError(f"its fields {', '.join(fields)} have no two answers: name them `response_a`, `response_b`")
    if tags and [_meant(tag, sides) for tag in tags] != [*sides]:
        raise RowError(
            f"it compares {' and '.join(tags)}, which may be `{sides[0]}` and `{sides[1]}`: name them alike"
        )
    return sides


def _meant(tag: str, sides: Sides) -> str | None:
    """Return the field that a tag of the labelling interface shows: of the same name, or the same end."""
    if tag in sides:
        return tag
    end = re.split(r"[^a-z0-9]|(?<=[a-z])(?=[0-9])", tag.lower())[-1]
    return next((side for side in sides if suffix_of(side, sides).lower() == end), None)


def _task(fields: Row, sides: Sides) -> ParsedRow:
    """Return the two answers of a task after its prompt; fields that are no part of them are `unread`."""
    shown = (kind for kind, medium in MEDIUM.items() if all(medium.fullmatch(str(fields[side])) for side in sides))
    kind = next(shown, None)
    if kind:
        parsed = media_pair(fields, sides, image_turn if kind == "image" else video_turn)
    else:
        parsed = read_pair(fields, sides, PROMPTS)
    read = {*sides, *MEDIA, "system", *PROMPTS} - parsed.skipped
    unread = {name: value for name, value in fields.items() if name not in read and value is not None}
    return replace(parsed, skipped=frozenset(), unread=unread)


MEDIUM = {
    "image": re.compile(r".*\.(png|jpe?g|webp|gif|bmp)|data:image/.*", re.I),
    "video": re.compile(r".*\.(mp4|webm|mov|mkv|avi)|data:video/.*", re.I),
}


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowError(f"`{name}` must be an object with the texts and media of the task, and is {shorten(value)}")
    return {key: cell for key, cell in value.items() if cell is not None}
