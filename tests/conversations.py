"""Short constructors of conversations and comparisons."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image as Pillow

from vlmrm.conversation import Comparison, Judgement, Message, Reference, media_of


def png(colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (30, 30), colour).save(buffer, "PNG")
    return buffer.getvalue()


def references(messages: Sequence[Message]) -> list[Reference]:
    """Return the references of images and videos, in reading order."""
    return [medium.reference for medium in media_of(messages)]


def rated(
    row_id: str, prompt: Sequence[Message], answers: Sequence[Sequence[Message]], ratings: Sequence[float], **more: Any
) -> Comparison:
    """Return a comparison with one judgement of all answers, `ratings`; higher is better, equal ones tie."""
    judgement = Judgement(tuple(range(len(answers))), tuple(ratings))
    return Comparison(row_id, tuple(prompt), tuple(map(tuple, answers)), (judgement,), **more)
