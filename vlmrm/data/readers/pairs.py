"""`chosen` and `rejected`: simple rows, conversational rows, and TRL's format with explicit or implicit prompt.

Answers that begin with the assistant follow the row's prompt. Answers that begin with a user or system turn are whole
conversations ("implicit prompt"): the messages that they have in common are the prompt.
"""

from __future__ import annotations

from vlmrm.data.messages import to_messages
from vlmrm.data.readers.layout import CHOSEN, MEDIA, REJECTED, Layout, Reading, Row, common_turns, turns, with_media
from vlmrm.data.schema import text_of
from vlmrm.errors import RowError

PROMPTS = ("prompt", "question", "messages")  # the first that a row has


def _read(row: Row) -> Reading:
    chosen, rejected = to_messages(row["chosen"], "assistant"), to_messages(row["rejected"], "assistant")
    asked = next((name for name in PROMPTS if name in row), None)
    prompt = None if asked is None else row[asked]
    whole = chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant"
    if whole and isinstance(prompt, str) and prompt.strip() not in text_of(chosen):
        raise RowError("`chosen` is a whole conversation without the row's `prompt` in it: leave one of them out")
    before = [] if whole else turns(row, prompt)
    conversations = [with_media(row, [*before, *answer]) for answer in (chosen, rejected)]
    shared = common_turns(*conversations) if whole else len(before)
    skipped = frozenset({"system", *PROMPTS}) - (frozenset() if whole else {"system", asked})
    return Reading(conversations, [CHOSEN, REJECTED], shared, skipped)


PAIR = Layout(
    "chosen / rejected",
    _read,
    required=frozenset({"chosen", "rejected"}),
    optional=MEDIA | {"system", *PROMPTS},
)
