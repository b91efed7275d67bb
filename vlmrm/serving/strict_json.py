"""JSON of requests, read without ambiguity and within limits of depth and size."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import FailFast

from vlmrm.serving.errors import STATUS, InvalidRequest
from vlmrm.serving.service import TooLarge
from vlmrm.serving.settings import Limits

# An unterminated string matches to the end of the text, so that not every quote in it is tried as a beginning.
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
SHORT = 64  # characters, of which no image is made
BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
MANY_KEYS = 4096  # of one object, each of which may be an error of its own
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(body: bytes, limits: Limits) -> Any:
    """Parse JSON without duplicate keys, NaN or infinity, and within the limits of depth and number of values.

    Raises:
        InvalidRequest: for what is not JSON, is ambiguous, or would take far more memory than it has bytes.
    """
    _check_structure(body, limits)
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
        )
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
        if len(body) > limits.max_text_bytes and count_text(value, besides=is_medium) > limits.max_text_bytes:
            raise InvalidRequest(too_much_text(limits.max_text_bytes))
        return value
    except UnicodeDecodeError as error:
        raise InvalidRequest("the JSON is not UTF-8: encode it so.") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the JSON has half of a surrogate pair, which is no character: leave it out.") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the JSON is broken at character {error.pos} ({error.msg}).") from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise InvalidRequest("the JSON is nested too deep, or has a number that is too long.") from error


def too_much_text(limit: int) -> str:
    return f"the texts of the request are over the limit max_text_bytes of {limit}: send fewer items at a time."


def is_medium(text: str) -> bool:
    """Return whether a text may be a medium, in base64 or as a data URI."""
    return text[:5].lower() == "data:" or (len(text) > SHORT and BASE64.fullmatch(text) is not None)


def count_text(value: Any, besides: Callable[[str], bool] = lambda text: False) -> int:
    """Return the characters of all texts of a tree, without those `besides`."""
    if isinstance(value, str):
        return 0 if besides(value) else len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(count_text(part, besides) for part in parts)


def _check_structure(body: bytes, limits: Limits) -> None:
    """Check the limits before anything is built: a megabyte of `[[[[` becomes a hundred of Python objects."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= limits.max_json_depth and opened + body.count(b",") <= limits.max_json_values:
        return
    bare = STRING.sub(b"", body)
    values = bare.count(b"[") + bare.count(b"{") + bare.count(b",")
    if values > limits.max_json_values:
        raise InvalidRequest(f"the JSON has over {limits.max_json_values} values: send fewer items at a time.")
    brackets = bare.translate(BRACKETS, NO_BRACKETS)
    for _ in range(limits.max_json_depth):  # a level at a time; what is not closed, the parser refuses early
        brackets = brackets.replace(b"[]", b"")
    if b"[]" in brackets:
        raise InvalidRequest(f"the JSON is nested deeper than the limit of {limits.max_json_depth}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MANY_KEYS:
        raise InvalidRequest(f"the JSON has an object of {len(pairs)} keys: {MANY_KEYS} are the most.")
    content = dict(pairs)
    if len(content) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidRequest(f"the JSON has the key {twice[:60]!r} twice in one object: send it once.")
    return content


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise InvalidRequest(f"the JSON has the number {digits[:20]}, which is too large: send one that is not.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the JSON has {name}, which JSON has no number for: leave it out or send null.")


Entry = TypeVar("Entry")


class _UpToTheFirstError(FailFast):
    __hash__ = object.__hash__  # the types of a union are kept in a set


Column = Annotated[list[Entry], _UpToTheFirstError()]
"""A list of a request: to find and describe every error in a small body would stop the event loop for a second."""


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = await self.app.state.gateway.parsers.parse(body)
            except (InvalidRequest, TooLarge) as error:
                # FastAPI replaces any other error that is raised while it reads a body by a sentence of its own.
                raise HTTPException(STATUS[type(error)], str(error)) from error
        return self._json


class StrictRoute(APIRoute):
    """A route whose JSON is read by `strict_json`: `APIRouter(route_class=StrictRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
