"""Pickles of texts, bytes, numbers, lists and dictionaries, read without unpickling: nothing in them is run."""

from __future__ import annotations

import pickletools
from typing import Any

from vlmrm.errors import RowError

VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ARGUMENTS = (
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT"),
)
MAX_OPERATIONS = 100_000  # each of a few bytes, and a Python object


def read_pickle(data: bytes) -> Any:
    """Return the plain data of a pickle as Python writes it since 3.8, protocol 4 or 5."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            name = operation.name
            if count == MAX_OPERATIONS:
                raise RowError(f"a pickle has over {MAX_OPERATIONS} operations: send fewer items at a time")
            if name in ARGUMENTS:
                stack.append(argument)
            elif name in VALUES:
                stack.append(VALUES[name])
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else {})
            elif name == "MARK":
                marks.append(len(stack))
            elif name == "MEMOIZE":
                memo.append(stack[-1])
            elif name in ("BINGET", "LONG_BINGET") and isinstance(it := memo[int(argument or 0)], (str, bytes)):
                stack.append(it)  # a list twice could hold itself
            elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
                _fill(stack, marks.pop() if name.endswith("S") else len(stack) - (1 if name == "APPEND" else 2))
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise RowError(f"a pickle holds more than plain data ({name}), and none is unpickled here: send JSON")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise RowError("the body is no whole pickle of protocol 4 or 5") from error
    raise RowError("the body is no whole pickle of protocol 4 or 5")


def _fill(stack: list[Any], start: int) -> None:
    """Put what is on the stack from `start` into the list or dictionary below it."""
    container, content = stack[start - 1], stack[start:]
    del stack[start:]
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    else:
        container.extend(content)
