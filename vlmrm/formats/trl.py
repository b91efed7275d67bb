"""`chosen` and `rejected`: simple rows, conversational rows, and TRL's format with explicit or implicit prompt.

Answers that begin with the assistant follow the row's prompt. Answers that begin with a user or system turn are whole
conversations ("implicit prompt"): the messages that they have in common are the prompt. So are texts that spell out
their turns as Anthropic's HH data do: "\\n\\nHuman: ...\\n\\nAssistant: ...".
"""

from __future__ import annotations

from vlmrm.conversation import Messages, text_of
from vlmrm.errors import RowError
from vlmrm.formats.hh import read_turns
from vlmrm.formats.layout import CHOSEN, MEDIA, REJECTED, Layout, Reading, Row, common_turns, turns, with_media
from vlmrm.formats.openai import read_messages

PROMPTS = ("prompt", "question", "messages")  # the first that a row has


def _read(row: Row) -> Reading:
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    asked = next((name for name in PROMPTS if name in row), None)
    prompt = None if asked is None else row[asked]
    whole = chosen[0].role != "assistant"
    if whole != (rejected[0].role != "assistant"):
        raise RowError("one of `chosen` and `rejected` is a whole conversation, the other an answer: write both alike")
    if whole and isinstance(prompt, str) and prompt.strip() not in text_of(chosen):
        raise RowError("`chosen` is a whole conversation without the row's `prompt` in it: leave one of them out")
    before = () if whole else turns(row, prompt)
    conversations = [with_media(row, (*before, *answer)) for answer in (chosen, rejected)]
    shared = common_turns(*conversations) if whole else len(before)
    skipped = frozenset({"system", *PROMPTS}) - (frozenset() if whole else {"system", asked})
    return Reading(conversations, [CHOSEN, REJECTED], shared, skipped=skipped)


def _answer(row: Row, side: str) -> Messages:
    """Return what `chosen` or `rejected` says: an answer, or a whole conversation that ends with one.

    Raises:
        RowError: when a text of HH's turns does not end with one.
    """
    spelled_out = read_turns(row[side])
    if spelled_out and spelled_out[-1].role != "assistant":
        raise RowError(f"`{side}` ends without an answer of the assistant: remove the row")
    return spelled_out or read_messages(row[side], "assistant")


PAIR = Layout(
    "chosen / rejected",
    _read,
    required=frozenset({"chosen", "rejected"}),
    optional=MEDIA | {"system", *PROMPTS},
)
