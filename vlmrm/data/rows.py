"""One row of any known layout → one `Comparison`, with nothing of it left out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vlmrm.conversation import Comparison, Judgement, Message, Messages, Part, Text
from vlmrm.data.unread import SPECIAL, check_all_read
from vlmrm.errors import DataError, RowError
from vlmrm.formats import LAYOUTS_TO_SCORE, recognise
from vlmrm.formats.layout import Layout, Reading

# The one column of a line that is no row; it says why. In other rows of its table it is empty.
MALFORMED = "$malformed"

Resolve = Callable[[Any], Any]  # a media reference of a row into one that can be opened from anywhere


def read_row(row: Mapping[str, Any], row_id: str, resolve: Resolve) -> Comparison:
    """Return the preferences of one row.

    Raises:
        RowError: with the row's id, what is wrong and what to do.
    """
    cells, row_id = cells_and_id(row, row_id)
    with with_row_id(row_id):
        layout = recognise(cells)
        reading = layout.read(cells)
        if reading.unjudged:
            raise RowError(f"{reading.unjudged}: remove the row, or leave such rows out with bad_rows: skip")
        answers = [resolved(answer, resolve) for answer in reading.answers()]
        judgement = _judgement(reading, cells, len(answers))
        _check_answers(answers, judgement.values)
        other = {name: value for name, value in cells.items() if name not in layout.known() | SPECIAL}
        category = cells.get("category")
        comparison = Comparison(
            id=row_id,
            prompt=resolved(reading.prompt(), resolve),
            answers=tuple(answers),
            judgements=(judgement,),
            category=None if category is None else str(category),
            columns={name: value for name, value in other.items() if isinstance(value, (str, int, float, bool))},
        )
        return _nothing_unread(comparison, cells, layout, reading, resolve)


def read_answers(row: Mapping[str, Any], row_id: str, resolve: Resolve) -> Comparison:
    """Return the row's answers, of which none need be preferred: they may be alike, or there may be one.

    Raises:
        RowError: with the row's id, what is wrong and what to do.
    """
    cells, row_id = cells_and_id(row, row_id)
    with with_row_id(row_id):
        layout = recognise(cells, LAYOUTS_TO_SCORE)
        reading = layout.read(cells)
        if not reading.conversations:
            raise RowError("it has no answer to score")
        answers = tuple(resolved(answer, resolve) for answer in reading.answers())
        comparison = Comparison(row_id, resolved(reading.prompt(), resolve), answers)
        return _nothing_unread(comparison, cells, layout, reading, resolve)


def _nothing_unread(
    comparison: Comparison, cells: Mapping[str, Any], layout: Layout, reading: Reading, resolve: Resolve
) -> Comparison:
    comparison.conversations()  # refuses a place for media with nothing in it
    check_all_read(cells, layout, reading, comparison, resolve)
    return comparison


def cells_and_id(row: Mapping[str, Any], row_id: str) -> tuple[dict[str, Any], str]:
    """Return the cells of a row that are not empty, and its own id where it has one.

    Raises:
        RowError: when it is a line that could not be parsed.
    """
    if row.get(MALFORMED):
        raise RowError(row[MALFORMED], row_id)
    cells = {name: value for name, value in row.items() if value is not None and name != MALFORMED}
    return cells, str(cells.get("id", row_id))


@contextmanager
def with_row_id(row_id: str) -> Generator[None]:
    """Makes every DataError raised inside a RowError that names the row."""
    try:
        yield
    except RowError as error:
        raise type(error)(error.reason, row_id) from error
    except DataError as error:
        raise RowError(str(error), row_id) from error


def resolved(messages: Sequence[Message], resolve: Resolve) -> Messages:
    """Return the messages with each media reference as `resolve` turns it."""

    def part(old: Part) -> Part:
        return old if isinstance(old, Text) else replace(old, reference=resolve(old.reference))

    return tuple(Message(message.role, tuple(map(part, message.content))) for message in messages)


def _judgement(reading: Reading, cells: Mapping[str, Any], count: int) -> Judgement:
    """Return what the row says of its answers: all of one value if they tie."""
    tie = cells.get("tie", False)
    if tie not in (False, True):
        raise RowError(f"`tie` is {tie!r}: write true or false")
    return Judgement(
        tuple(range(count)),
        (1.0,) * count if tie else tuple(reading.values),
        reading.kind,
        margin=cells.get("margin"),
        weight=cells.get("weight", 1.0),
    )


def _check_answers(answers: Sequence[Messages], values: Sequence[float]) -> None:
    if len(answers) < 2:
        raise RowError(f"it has {len(answers)} answer(s): a preference needs two, remove the row")
    for number, answer in enumerate(answers, 1):
        if not any(message.text.strip() or message.media for message in answer):
            raise RowError(f"answer {number} is empty: fill it in or remove the row")
    if all(answer == answers[0] for answer in answers[1:]):
        raise RowError("the answers are the same, so nothing can be preferred: remove the row")
    for i, first in enumerate(answers):
        for j in range(i + 1, len(answers)):
            if values[i] != values[j] and first == answers[j]:
                raise RowError("the same answer is listed twice with different scores: keep one of them")
