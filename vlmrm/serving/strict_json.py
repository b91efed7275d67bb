"""JSON of requests, read without ambiguity and within limits of depth and size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.settings import Limits
from vlmrm.settings import describe_errors

Model = TypeVar("Model", bound=BaseModel)

# An unterminated string matches to the end of the text, so that not every quote in it is tried as a beginning.
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
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
        return value
    except UnicodeDecodeError as error:
        raise InvalidRequest("the JSON is not UTF-8: encode it so.") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the JSON has half of a surrogate pair, which is no character: leave it out.") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the JSON is broken at character {error.pos} ({error.msg}).") from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise InvalidRequest("the JSON is nested too deep, or has a number that is too long.") from error


def parse_json(kind: type[Model], body: bytes, limits: Limits) -> Model:
    """Return `body` as a model, for routes whose body FastAPI does not read; raises InvalidRequest."""
    try:
        return kind.model_validate(strict_json(body, limits))
    except ValidationError as error:
        raise InvalidRequest(f"{describe_errors(error.errors(), kind)}.") from None


def _check_structure(body: bytes, limits: Limits) -> None:
    """Check the limits before anything is built: a megabyte of `[[[[` becomes a hundred of Python objects."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= limits.max_json_depth and opened + body.count(b",") <= limits.max_json_values:
        return
    bare = STRING.sub(b"", body)
    values = bare.count(b"[") + bare.count(b"{") + bare.count(b",")
    if values > limits.max_json_values:
        raise InvalidRequest(f"the JSON has over {limits.max_json_values} values: send fewer items at a time.")
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", bare):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > limits.max_json_depth:
        raise InvalidRequest(f"the JSON is nested {deepest} deep, over the limit of {limits.max_json_depth}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"the JSON has the key {twice[:60]!r} twice in one object: send it once.")
    return content


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise InvalidRequest(f"the JSON has the number {digits[:20]}, which is too large: send one that is not.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the JSON has {name}, which JSON has no number for: leave it out or send null.")


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = strict_json(body, self.app.state.gateway.settings.limits)
            except InvalidRequest as error:
                # FastAPI replaces any other error that is raised while it reads a body by a sentence of its own.
                raise HTTPException(400, str(error)) from error
        return self._json


class StrictRoute(APIRoute):
    """A route whose JSON is read by `strict_json`: `APIRouter(route_class=StrictRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
