"""JSON of requests, read without ambiguity and within limits of depth and size."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, FailFast, ValidationError
from pydantic_core import from_json

from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.settings import Limits
from vlmrm.settings import describe_errors

MANY_KEYS = 4096  # of one object, each of which may be an error of its own

Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], value: Any) -> Model:
    """Return a value as a model, for routes that keep their body from FastAPI; raises InvalidRequest."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(f"{describe_errors(error.errors(), kind)}.") from None


def strict_json(body: bytes, limits: Limits) -> Any:
    """Parse JSON without duplicate keys, NaN or infinity, and within the limits of depth and number of values."""
    bare = _bare(body, limits)
    # Before anything is built: a megabyte of `{"a":1},` becomes fifty of Python objects.
    if sum(map(bare.count, (b"[", b"{", b","))) > limits.max_json_values:
        raise _too_many(limits)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(_problem(body, bare, error)) from error
    if _keys(value, limits) < bare.count(b":"):  # the parser keeps the last of equal keys
        json.loads(body, object_pairs_hook=_unique)
    return value


def _bare(body: bytes, limits: Limits) -> bytes:
    """Return JSON without its strings; of a broken text, so far as it is JSON."""
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    most = 4 * (limits.max_json_values + 1)  # quotes: each value may have a key
    parts = body.split(b'"', most)
    if len(parts) > most:
        raise _too_many(limits)
    return b"".join(parts[::2])


def _too_many(limits: Limits) -> InvalidRequest:
    return InvalidRequest(f"the JSON has over {limits.max_json_values} values: send fewer items at a time.")


def _problem(body: bytes, bare: bytes, error: ValueError) -> str:
    if constant := re.search(rb"NaN|-?Infinity", bare):
        return f"the JSON has {constant[0].decode()}, which JSON has no number for: leave it out or send null."
    try:
        body.decode()
    except UnicodeDecodeError:
        return "the JSON is not UTF-8: encode it so."
    return f"the JSON is broken: {error}."


def _keys(value: Any, limits: Limits) -> int:
    keys, level, depth = 0, [value], 0
    while level:
        if depth > limits.max_json_depth:
            raise InvalidRequest(f"the JSON is nested deeper than the limit of {limits.max_json_depth}.")
        below: list[Any] = []
        for part in level:
            if isinstance(part, list):
                below += part
            elif isinstance(part, dict):
                if len(part) > MANY_KEYS:
                    raise InvalidRequest(f"the JSON has an object of {len(part)} keys: {MANY_KEYS} are the most.")
                keys += len(part)
                below += part.values()
            elif isinstance(part, float) and math.isinf(part):
                raise InvalidRequest("the JSON has a number that is too large: send one below 1e308.")
        level, depth = below, depth + 1
    return keys


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidRequest(f"the JSON has the key {twice[:60]!r} twice in one object: send it once.")
    return content


Entry = TypeVar("Entry")


class _UpToTheFirstError(FailFast):
    __hash__ = object.__hash__  # the types of a union are kept in a set


Column = Annotated[list[Entry], _UpToTheFirstError()]
"""A list of a request: to find and describe every error in a small body would take a second."""


class StrictRoute(APIRoute):
    """A route that reads JSON by `strict_json`: `APIRouter(route_class=StrictRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if self.body_field is not None and "json" in request.headers.get("content-type", "").lower():
                request._json = strict_json(await request.body(), request.app.state.gateway.settings.limits)
            return await handle(request)

        return strict


def body_of(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body, by media type, has one of these schemas."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}
