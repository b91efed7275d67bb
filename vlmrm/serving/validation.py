"""What pydantic finds wrong, as one sentence without the value, which may be a secret or a picture."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def first_wrong(errors: Sequence[Mapping[str, Any]], kind: type[BaseModel] | None = None) -> str:
    """What to say of pydantic's `errors`. An unknown key goes first: it may be why another is missing.

    Args:
        kind: the model that was to be filled; its keys are what a mistyped one may have meant.
    """
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = ".".join(str(part)[:40] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *block, key = first["loc"]
        near = difflib.get_close_matches(str(key), _keys(kind, block), 1)
        return f"unknown key {place}" + (f" (did you mean {near[0]}?)" if near else "")
    if first["type"] == "missing":
        return f"{place} is missing"
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{place}: {reason}" if place else reason


def _keys(kind: Any, block: Sequence[int | str]) -> list[str]:
    """The keys that a block of `kind` may have; none where it is no model."""
    for part in block:
        if isinstance(part, str) and kind is not None:
            field = kind.model_fields.get(part)
            kind = None if field is None else model_in(field.annotation)
    return [] if kind is None else list(kind.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of an annotation such as `list[Model]` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := model_in(one)) is not None), None)
