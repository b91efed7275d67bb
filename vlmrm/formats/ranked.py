"""Ranked lists: a prompt, several answers (texts, messages or images) and a score for each, higher for better."""

from __future__ import annotations

from dataclasses import replace

from vlmrm.formats.layout import MEDIA, Layout, Reading, Row, listed, numbers, turns, with_media
from vlmrm.formats.openai import read_messages
from vlmrm.formats.text_to_image import images_for


def _read(row: Row) -> Reading:
    if "response_images" in row:
        images = listed(row["response_images"], "response_images")
        reading = images_for(row, row["prompt"], images, numbers(row["scores"], "scores", len(images)))
        return replace(reading, kind="rating", skipped=frozenset({"responses"}))
    answers = listed(row["responses"], "responses")
    ratings = numbers(row["scores"], "scores", len(answers))
    prompt = turns(row, row["prompt"])
    conversations = [with_media(row, (*prompt, *read_messages(answer, "assistant"))) for answer in answers]
    return Reading(conversations, ratings, len(prompt), "rating")


RANKED = Layout(
    "ranked list",
    _read,
    required=frozenset({"prompt", "scores"}),
    one_of=frozenset({"responses", "response_images"}),
    optional=MEDIA | {"system"},
)
