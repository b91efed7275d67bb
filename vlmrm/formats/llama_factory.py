"""LLaMA-Factory's ranking data, in its alpaca and sharegpt forms."""

from __future__ import annotations

from vlmrm.conversation import Messages
from vlmrm.errors import RowError
from vlmrm.formats.layout import CHOSEN, MEDIA, REJECTED, Layout, Reading, Row, turns, with_media
from vlmrm.formats.openai import read_messages


def _read_alpaca(row: Row) -> Reading:
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    earlier: Messages = ()
    for exchange in row.get("history", []):
        if not isinstance(exchange, (list, tuple)) or len(exchange) != 2:
            raise RowError("`history` must be a list of [question, answer] pairs")
        earlier += read_messages(exchange[0], "user") + read_messages(exchange[1], "assistant")
    return _pair(row, turns(row, (*earlier, *read_messages(question, "user"))))


def _read_sharegpt(row: Row) -> Reading:
    return _pair(row, turns(row, read_messages(row["conversations"], "user")))


def _pair(row: Row, prompt: Messages) -> Reading:
    answers = [read_messages(row[side], "assistant") for side in ("chosen", "rejected")]
    conversations = [with_media(row, (*prompt, *answer)) for answer in answers]
    return Reading(conversations, [CHOSEN, REJECTED], len(prompt))


ALPACA = Layout(
    "LLaMA-Factory alpaca",
    _read_alpaca,
    required=frozenset({"instruction", "chosen", "rejected"}),
    optional=MEDIA | {"input", "system", "history"},
)
SHAREGPT = Layout(
    "LLaMA-Factory sharegpt",
    _read_sharegpt,
    required=frozenset({"conversations", "chosen", "rejected"}),
    optional=MEDIA | {"system"},
)
