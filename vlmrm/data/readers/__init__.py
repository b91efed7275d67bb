"""One row of any known layout → one `Comparison`. Each source format has a file here; `LAYOUTS` is their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vlmrm.data.readers.layout import CHOSEN, Layout, Reading
from vlmrm.data.readers.llama_factory import ALPACA, SHAREGPT
from vlmrm.data.readers.pairs import PAIR
from vlmrm.data.readers.ranked import RANKED
from vlmrm.data.readers.swift import SWIFT
from vlmrm.data.readers.text_to_image import HPSV3, IMAGE_PAIR, IMAGE_REWARD, PICK_A_PIC
from vlmrm.data.readers.unread import SPECIAL, check_all_read, is_noteworthy
from vlmrm.data.schema import Branch, Comparison, Messages
from vlmrm.errors import DataError, RowError

__all__ = [
    "LAYOUTS",
    "MALFORMED",
    "SPECIAL",
    "Layout",
    "cells_and_id",
    "check_all_read",
    "is_noteworthy",
    "read_row",
    "recognise",
    "resolved",
    "with_row_id",
]

# The first that fits reads the row: the particular before the general.
LAYOUTS = (PICK_A_PIC, IMAGE_REWARD, HPSV3, IMAGE_PAIR, RANKED, ALPACA, SHAREGPT, SWIFT, PAIR)

# The one column of a line that is no row; it says why. In other rows of its table it is empty.
MALFORMED = "$malformed"


def recognise(columns: Iterable[str], layouts: Sequence[Layout] = LAYOUTS) -> Layout:
    """The one of `layouts` that columns of these names are read by.

    Raises:
        DataError: listing the columns, and what the nearest layout lacks if at least half of its columns are there.
    """
    names = frozenset(columns)
    for layout in layouts:
        if layout.matches(names):
            return layout
    nearest = max(layouts, key=lambda layout: (_share(layout, names), len(layout.known() & names)))
    if _share(nearest, names) >= 0.5:
        hint = f"the nearest is `{nearest.name}`, which also needs {nearest.lacks(names)}"
    else:
        hint = "rename them to those of one, such as `prompt`, `chosen` and `rejected`"
    raise DataError(
        f"no known layout has the columns {', '.join(sorted(names)) or '(none)'}: {hint} "
        "(docs/data.md shows every layout)"
    )


def _share(layout: Layout, names: frozenset[str]) -> float:
    """Return the share of the columns that `layout` needs that are there."""
    needed = len(layout.required) + bool(layout.one_of)
    return (len(layout.required & names) + bool(layout.one_of & names)) / needed


def read_row(row: Mapping[str, Any], row_id: str, resolve: Callable[[Any], Any]) -> Comparison:
    """Reads one row; `resolve` turns a media reference of the row into one that can be opened from anywhere.

    Raises:
        RowError: with the row's id, what is wrong and what to do.
    """
    cells, row_id = cells_and_id(row, row_id)
    with with_row_id(row_id):
        layout = recognise(cells)
        reading = layout.read(cells)
        if reading.unjudged:
            raise RowError(f"{reading.unjudged}: remove the row, or leave such rows out with bad_rows: skip")
        branches = _checked([Branch(resolved(b.messages, resolve), b.rating) for b in _tied(reading, cells)])
        other = {name: value for name, value in cells.items() if name not in layout.known() | SPECIAL}
        category = cells.get("category")
        comparison = Comparison(
            id=row_id,
            prompt=resolved(reading.prompt(), resolve),
            branches=branches,
            margin=_number(cells, "margin", None),
            weight=_number(cells, "weight", 1.0, least=0.0),
            category=None if category is None else str(category),
            columns={name: value for name, value in other.items() if isinstance(value, (str, int, float, bool))},
        )
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


def _tied(reading: Reading, cells: Mapping[str, Any]) -> list[Branch]:
    """The branches, of one rating if the row says that they tie."""
    tie = cells.get("tie", False)
    if tie not in (False, True):
        raise RowError(f"`tie` is {tie!r}: write true or false")
    branches = reading.branches()
    return [replace(branch, rating=CHOSEN) for branch in branches] if tie else branches


def resolved(messages: Messages, resolve: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The messages with each media reference as `resolve` turns it."""
    return [{**message, "content": [_part(part, resolve) for part in message["content"]]} for message in messages]


def _part(part: dict[str, Any], resolve: Callable[[Any], Any]) -> dict[str, Any]:
    kind = part["type"]
    return part if kind == "text" else {**part, kind: resolve(part[kind])}


def _checked(branches: list[Branch]) -> list[Branch]:
    if len(branches) < 2:
        raise RowError(f"it has {len(branches)} answer(s): a preference needs two, remove the row")
    for number, branch in enumerate(branches, 1):
        if not any(part["type"] != "text" or part["text"].strip() for m in branch.messages for part in m["content"]):
            raise RowError(f"answer {number} is empty: fill it in or remove the row")
        if not math.isfinite(branch.rating):
            raise RowError(f"the score of answer {number} is {branch.rating}: write a finite number")
    if all(branch.messages == branches[0].messages for branch in branches[1:]):
        raise RowError("the answers are the same, so nothing can be preferred: remove the row")
    for i, first in enumerate(branches):
        for second in branches[i + 1 :]:
            if first.rating != second.rating and first.messages == second.messages:
                raise RowError("the same answer is listed twice with different scores: keep one of them")
    return branches


def _number(cells: Mapping[str, Any], name: str, default: Any, least: float = -math.inf) -> Any:
    value = cells.get(name, default)
    if value is default:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(f"`{name}` is {value!r}: write a number")
    if not math.isfinite(value):
        raise RowError(f"`{name}` is {value}: write a finite number or leave it out")
    if value < least:
        raise RowError(f"`{name}` is {value}: it must be at least {least:g}")
    return float(value)
