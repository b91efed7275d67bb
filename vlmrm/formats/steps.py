"""Judged parts of an answer: the steps of a solution, the frames of an episode. Each row is its prefixes, each judged.

A step is scored as the answer that ends with it, so that a policy's unfinished answer has the score of its last step;
a shared batch computes their common tokens once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmrm.conversation import Image, Judgement, Message
from vlmrm.errors import RowError
from vlmrm.formats.layout import (
    MEDIA,
    Kind,
    ParsedRow,
    Row,
    first_of,
    layout,
    question_turns,
    require_list,
    with_media,
)
from vlmrm.formats.openai import read_messages, read_reference

PROMPTS = ("prompt", "question", "instruction", "task")
TEXTS, LABELS = ("step", "text", "value", "content"), ("score", "label", "rating", "correctness")
WORDS = {"+": 1.0, "-": 0.0, "good": 1.0, "bad": 0.0, "correct": 1.0, "incorrect": 0.0}
STEP = "ки"  # Math-Shepherd's mark of a step's end, and in its labels + or - in that place


@layout(
    "steps",
    any_of=[[("completions", "labels"), ("steps",)], [(name,) for name in PROMPTS]],
    optional=[*MEDIA, "system", "labels"],
    without=["rejected"],
)
def steps(row: Row) -> ParsedRow:
    # TRL's stepwise supervision, or objects with the text and the label of a step as in VisualPRM400K.
    column = first_of(row, ("completions", "steps"))
    assert column is not None
    items = require_list(row[column], column)
    texts = [_field(item, TEXTS, column) for item in items]
    labels = row.get("labels", [_field(item, LABELS, column) for item in items] if "labels" not in row else ())
    if len(labels) != len(texts):
        raise RowError(f"it has {len(texts)} steps and {len(labels)} labels: give each step one")
    return _solution(row, row[first_of(row, PROMPTS) or ""], texts, [_label(label) for label in labels])


@layout("Math-Shepherd", ["input", "label"], optional=["task", *MEDIA])
def math_shepherd(row: Row) -> ParsedRow:
    parts = [part.strip() for part in str(row["input"]).split(STEP)]
    marks = re.findall(r"(?<=\s)([+-])(?=\s*(?:\n|$))", str(row["label"]))
    question, mark, first = parts[0].partition("Step 1:")
    texts = [mark + first, *(part for part in parts[1:] if part)]
    if not mark or len(texts) != len(marks):
        raise RowError(f"its `input` has {len(texts)} steps that end with {STEP}, its `label` {len(marks)} of + and -")
    return _solution(row, question.strip(), [text.strip() for text in texts], [WORDS[it] for it in marks])


@layout("PRM800K", ["question", "label"], optional=["labeler", "timestamp", "generation"])
def prm800k(row: Row) -> ParsedRow:
    """Follow the steps that were chosen, up to the first that nobody wrote; neutral ones are right."""
    texts, labels = [], []
    try:
        for step in row["label"]["steps"]:
            number = step.get("chosen_completion")
            rated = step["completions"][number if number is not None else 0]
            if rated.get("rating") is None:
                break
            texts.append(rated["text"])
            labels.append(float(rated["rating"] >= 0))
        return _solution(row, row["question"]["problem"], texts, labels)
    except (KeyError, IndexError, TypeError) as error:
        raise RowError("its `label` has no steps with completions and their ratings, as PRM800K's") from error


@layout("progress", ["frames", "progress"], one_of=PROMPTS, optional=["system"])
def progress(row: Row) -> ParsedRow:
    # An episode: what each frame shows is judged by all frames up to it. Of a failure the progress may be unknown.
    frames = require_list(row["frames"], "frames")
    values = require_list(row["progress"], "progress")
    if len(frames) != len(values):
        raise RowError(f"it has {len(frames)} frames and {len(values)} values of progress: give each frame one")
    prompt = question_turns(row, row[first_of(row, PROMPTS) or ""])
    images = [Image(read_reference(frame)) for frame in frames]
    answers = [Message.of("assistant", *images[: number + 1]) for number in range(len(images))]
    known = tuple(number for number, value in enumerate(values) if value is not None)
    judged = (Judgement(known, tuple(values[number] for number in known), "progress"),) if known else ()
    parsed = _judged([(*prompt, answer) for answer in answers], [it or 0.0 for it in values], len(prompt), "progress")
    return replace(parsed, judgements=judged, unjudged="" if known else "no frame has a progress")


def _solution(row: Row, question: Any, texts: Sequence[str], labels: Sequence[float]) -> ParsedRow:
    prompt = question_turns(row, question if not isinstance(question, str) else question or None)
    prefixes = ["\n".join(texts[: number + 1]) for number in range(len(texts))]
    conversations = [with_media(row, (*prompt, *read_messages(text, "assistant"))) for text in prefixes]
    return _judged(conversations, labels, len(prompt), "correctness")


def _judged(conversations: Sequence[Any], values: Sequence[float], shared: int, kind: Kind) -> ParsedRow:
    if not conversations:
        raise RowError(f"there is no part whose {kind} is judged: remove the row")
    return ParsedRow(conversations, values, shared, kind)


def _field(item: Any, names: Sequence[str], column: str) -> Any:
    if isinstance(item, str) and names is TEXTS:
        return item
    found = next((item[name] for name in names if name in item), None) if isinstance(item, dict) else None
    if found is None:
        raise RowError(f"`{column}` holds {item!r:.60}, without {' or '.join(names[:2])}")
    return found


def _label(label: Any) -> float:
    value = WORDS.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(value, (bool, int, float)):
        raise RowError(f"a step is judged {label!r:.40}: write true or false, or a number from 0 to 1")
    return float(value)
