"""OpenRLHF's queries, of a reward function and of a server alike: texts and a label."""

from __future__ import annotations

import json
import re
from typing import Any

from vlmrm.conversation import Conversation
from vlmrm.errors import RowError
from vlmrm.formats.answers import read_answer
from vlmrm.formats.chatml import read_text
from vlmrm.formats.openai import read_messages

PADS = re.compile(r"(<\|?(?:image|video)(?:_pad)?\|?>)\1+")  # a decoded query has one for each token of a picture
END = re.compile(r"(?:(?:<\|[^<>|]+\|>|</s>)\s*)+$")  # of a turn, and padding


def read_query(prompt: str | None, query: str, label: Any) -> Conversation:
    """Return what is asked about: the label's prompt with the answer, else the rendered query itself.

    Raises:
        RowError: when it is neither, or its images do not fit.
    """
    try:
        row = json.loads(label) if isinstance(label, str) and label.startswith("{") else label
    except (ValueError, RecursionError) as error:
        raise RowError(f"its label looks like JSON and is none ({error})") from error
    row = row if isinstance(row, dict) else {}
    images, videos = row.get("images"), row.get("videos")
    readable = "<|im_start|>" in query or (prompt is None and query.lstrip()[:1] in ("[", "{"))  # rendered, or JSON
    if "prompt" not in row and not readable:
        raise RowError('its label is not {"prompt": ..., "images": [...]}: name such a column with --data.label_key')
    if "prompt" not in row and prompt is None:
        return read_text(query, images or (), videos or ())
    query = PADS.sub(r"\1", query)
    prompt = None if prompt is None else PADS.sub(r"\1", prompt)
    if prompt is None or not query.startswith(prompt):
        raise RowError("the query does not begin with its prompt: was it cut? Allow for longer prompts")
    answer = END.sub("", query[len(prompt) :])
    if "prompt" not in row:
        # The turns are those of the prompt: what the policy wrote after it is its answer, whatever it looks like.
        before = read_text(f"{prompt}<|im_end|>", images or (), videos or ()).prompt
        return Conversation((*before, *read_messages(answer, "assistant")))
    return read_answer(row["prompt"], answer, images, videos)
