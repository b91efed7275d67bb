"""A text policy's rows as the columns of a `RewardSet`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrm.data.schema import Message, text_of
from vlmrm.errors import RewardError, RowError
from vlmrm.scoring.adapters.rows import conversation, table


def text_columns(prompts: Sequence[Any], answers: Sequence[Any], images: Sequence[Any] | None) -> dict[str, list[Any]]:
    """`prompt`, `response`, and a prompt's images: one as `image`, several as `condition_images`.

    A prompt that is one user turn, images before text, is its text, as judges are sent it; any other stays messages.

    Raises:
        RewardError: naming the row whose images do not fit its prompt, or when the columns differ in length.
    """
    columns: dict[str, list[Any]] = {"prompt": [], "response": [], "image": [], "condition_images": []}
    for place, row in enumerate(table(prompts, answers, images)):
        try:
            *asked, answered = conversation(*row)
        except RowError as error:
            raise RewardError(f"sample {place}: {error.reason}") from error
        prompt, shown = _text_and_images(asked)
        columns["prompt"].append(prompt)
        columns["response"].append(text_of([answered]))
        columns["image"].append(shown[0] if len(shown) == 1 else None)
        columns["condition_images"].append(shown if len(shown) > 1 else None)
    return columns


def _text_and_images(asked: list[Message]) -> tuple[Any, list[Any]]:
    if len(asked) == 1 and asked[0]["role"] == "user" and asked[0]["content"]:
        *shown, text = asked[0]["content"]
        if text["type"] == "text" and all(part["type"] == "image" for part in shown):
            return text["text"], [part["image"] for part in shown]
    return asked, []
