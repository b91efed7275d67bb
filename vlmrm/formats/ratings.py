"""Ratings and rankings: a prompt with any number of answers, and a number for each from one rater or several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from vlmrm.conversation import shorten
from vlmrm.errors import RowError
from vlmrm.formats.layout import (
    MEDIA,
    Layout,
    ParsedRow,
    Row,
    as_list,
    first_of,
    image_turn,
    layout,
    question_turns,
    records,
    require_list,
    require_numbers,
    video_turn,
)
from vlmrm.formats.preferences import PROMPT_COLUMNS, images_for, with_answers
from vlmrm.formats.verdicts import with_raters

PROMPTS = ("prompt", "question", "instruction")  # of which the first is read
ANSWERS = ("response_images", "response_videos", "responses", "completions", "answers", "candidates")
ONE_ANSWER = (
    "it has one answer, and a preference needs two: name its ratings as `outputs`, or bring the rows of a prompt "
    'together as `responses` (or `response_images`) with their `scores`, as docs/data.md shows under "I have ratings"'
)


def _list_layout(
    name: str, numbers: Sequence[str], without: Sequence[str] = ()
) -> Callable[[Callable[[Row], ParsedRow]], Layout]:
    groups = [[(column,) for column in group] for group in (PROMPTS, ANSWERS, numbers)]
    return layout(name, any_of=groups, optional=PROMPT_COLUMNS, without=without)


@_list_layout("ranked list", ["scores", "ratings"])
def ranked(row: Row) -> ParsedRow:
    parsed = _answers(row)
    column = first_of(row, ("scores", "ratings"))
    assert column is not None
    verdicts = by_rater(row[column], column, len(parsed.conversations))
    skipped = parsed.skipped | frozenset({"scores", "ratings"}) - {column}
    return replace(with_raters(replace(parsed, kind="rating"), verdicts), kind="rating", skipped=skipped)


@_list_layout("ranking", ["ranks", "rank", "ranking"], without=["rejected"])
def ranking(row: Row) -> ParsedRow:
    # A rank of 1 is the best; a `ranking` may also be the order of the answers, which is another one.
    parsed = _answers(row)
    column = first_of(row, ("ranks", "rank", "ranking"))
    assert column is not None
    count = len(parsed.conversations)
    if column == "ranking" and (order := _as_order(row, count)) is not None:
        return replace(parsed, values=order)
    verdicts = by_rater(row[column], column, count)
    if column == "ranking" and not all(_reads_alike(values) for values in verdicts):
        return replace(
            parsed,
            unjudged=f"`ranking` is {shorten(row[column])}, which may be the ranks of the answers or their order: "
            "say `columns: {ranks: ranking}` if its first number is the rank of the first answer",
        )
    return with_raters(parsed, [[-rank for rank in values] for values in verdicts])


def _answers(row: Row) -> ParsedRow:
    """Return the prompt and the answers, without values; text answers beside images are skipped."""
    prompt = row[first_of(row, PROMPTS) or "prompt"]
    column = first_of(row, ANSWERS)
    assert column is not None
    answers = require_list(row[column], column)
    zeros = [0.0] * len(answers)
    if column in ("response_images", "response_videos"):
        parsed = images_for(row, prompt, answers, zeros, video_turn if column == "response_videos" else image_turn)
    else:
        parsed = with_answers(row, question_turns(row, prompt), answers, zeros)
    return replace(parsed, skipped=frozenset({*PROMPTS, *ANSWERS}) - {first_of(row, PROMPTS), column})


def by_rater(value: Any, name: str, count: int) -> list[list[float]]:
    """Return the numbers of `count` answers from each rater.

    A value has those of one rater, `{rater: numbers}`, a list of objects with the numbers of a rater each, or a list
    of lists, one for each answer or one for each rater.
    """
    if isinstance(value, Mapping) and not any(isinstance(item, Mapping) for item in value.values()):
        return [require_numbers(numbers, name, count) for numbers in value.values()]
    lists = require_list(value, name)
    if lists and all(isinstance(item, Mapping) for item in lists):
        inner = [first_of(item, (name, "scores", "ratings", "ranks", "values", "rank")) for item in lists]
        return [require_numbers(item.get(key), name, count) for item, key in zip(lists, inner, strict=True)]
    if not lists or not all(isinstance(item, (list, tuple)) for item in lists):
        return [require_numbers(value, name, count)]
    width = len(lists[0])
    columns = [list(column) for column in zip(*lists, strict=False)]
    if any(len(item) != width for item in lists) or not width:
        raise RowError(f"`{name}` holds lists of different lengths: give the numbers of all raters for each answer")
    if len(lists) == width == count and columns != [list(item) for item in lists]:
        raise RowError(
            f"`{name}` holds {count} lists of {count}, which may be of the answers or of the raters: name the raters, "
            '{"ann": [...], "bob": [...]}'
        )
    return [require_numbers(item, name, count) for item in (columns if len(lists) == count else lists)]


def _reads_alike(ranks: Sequence[float]) -> bool:
    """Return whether ranks mean the same as an order of the answers, or cannot be one."""
    start = min(ranks)
    if start not in (0, 1) or sorted(ranks) != [start + i for i in range(len(ranks))]:
        return True  # ties, or gaps
    return all(ranks[int(rank - start)] == start + i for i, rank in enumerate(ranks))


def _as_order(row: Row, count: int) -> list[float] | None:
    """Return the values of answers that `ranking` lists as texts, the best first; None if it holds no texts."""
    order = require_list(row["ranking"], "ranking")
    if not order or not all(isinstance(item, str) for item in order):
        return None
    answers = row[first_of(row, ANSWERS) or ""]
    if sorted(order) != sorted(map(str, answers)) or len(set(order)) != count:
        raise RowError("`ranking` holds texts that are not the answers: write the rank of each answer")
    return [float(count - order.index(answer)) for answer in answers]


# Answers that are objects with their ratings: UltraFeedback, VLFeedback, Nectar.

TEXT_KEYS = ("response", "answer", "text", "content", "completion", "output")
RATING_KEYS = ("overall_score", "fine-grained_score", "score", "rating", "annotations", "rank")


@layout(
    "rated completions",
    any_of=[[("completions",), ("answers",)], [(name,) for name in PROMPTS]],
    optional=[*MEDIA, "system", "img_path"],
    without=["rejected", "labels"],
)
def completions(row: Row) -> ParsedRow:
    column = first_of(row, ("completions", "answers"))
    assert column is not None
    items = records(row[column], column)
    answers = [next((item[key] for key in TEXT_KEYS if key in item), None) for item in items]
    if not items or None in answers:
        raise RowError(f"each of `{column}` must have a text, as `response` or `answer`")
    image = {} if MEDIA & row.keys() or "img_path" not in row else {"image": row["img_path"]}
    read: Row = {**row, **image}
    prompt = first_of(row, PROMPTS)
    skipped = frozenset({*PROMPTS, "completions", "answers"}) - {prompt, column}
    skipped |= frozenset() if image else frozenset({"img_path"})
    unread = {key: [item.get(key) for item in items] for key in items[0] if key not in (*TEXT_KEYS, *RATING_KEYS)}
    parsed = with_answers(read, question_turns(read, row[prompt or ""]), answers, [0.0] * len(items))
    parsed = replace(parsed, skipped=skipped, unread=unread)
    key = next((key for key in RATING_KEYS if any(item.get(key) is not None for item in items)), None)
    try:
        values = [_rating(item.get(key or ""), key, number) for number, item in enumerate(items, 1)]
    except RowError as error:
        return replace(parsed, unjudged=error.reason)
    return replace(parsed, values=values, kind="preference" if key == "rank" else "rating")


def _rating(value: Any, key: str | None, number: int) -> float:
    """Return the rating of an answer: a number, or the mean of the `Rating`s of its aspects."""
    if isinstance(value, Mapping) and value:
        ratings = [aspect.get("Rating") for aspect in value.values() if isinstance(aspect, Mapping)]
        return fmean(_rating(rating, key, number) for rating in ratings) if ratings else _rating(None, key, number)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(f"answer {number} has the rating {shorten(value)}" if key else "its answers have no ratings")
    return -float(value) if key == "rank" else float(value)


@layout(
    "HPDv2",
    any_of=[[("prompt",)], [("image_path",), ("file_path",)], [("rank",), ("human_preference",)]],
    optional=PROMPT_COLUMNS,
    without=["rejected"],
)
def hpdv2(row: Row) -> ParsedRow:
    column = first_of(row, ("image_path", "file_path"))
    assert column is not None
    images = as_list(row[column])
    if len(images) < 2:
        raise RowError(ONE_ANSWER)
    skipped = frozenset({"image_path", "file_path"}) - {column}
    numbers = "rank" if "rank" in row else "human_preference"
    values = require_numbers(row[numbers], numbers, len(images))
    parsed = replace(images_for(row, row["prompt"], images, values), skipped=skipped)
    if numbers == "rank":
        return replace(parsed, values=[-value for value in values])
    if len(set(values)) == 1:
        return replace(parsed, unjudged=f"`human_preference` is {row[numbers]}: no image is preferred")
    return parsed
