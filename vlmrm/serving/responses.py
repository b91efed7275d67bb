"""FastAPI's responses to errors, and their schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from starlette.exceptions import HTTPException as StarletteHTTPException

from vlmrm.errors import VlmrmError
from vlmrm.serving.errors import DESCRIPTIONS, InvalidRequest, error_answer
from vlmrm.serving.worker.channel import redact_paths
from vlmrm.settings import describe_errors, model_in

PHRASES = {
    404: "there is no such address: GET /openapi.json lists all of them.",
    405: "this address does not take this method: GET /openapi.json lists those it takes.",
}


class ErrorDetail(BaseModel):
    """The reason of an error, and its type."""

    message: str
    type: str


class ErrorResponse(BaseModel):
    """The body of every response with a status from 400 on."""

    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route in OpenAPI for errors with these statuses; without any, for all."""
    chosen = statuses or sorted(DESCRIPTIONS)
    return {status: {"model": ErrorResponse, "description": DESCRIPTIONS[status]} for status in chosen}


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(VlmrmError, _vlmrm_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(FormParserError, _form_error)  # before 1.8, Starlette lets it through


def error_of(error: VlmrmError) -> ErrorDetail:
    return ErrorDetail(message=redact_paths(str(error)), type=type(error).__name__)


def response_to(error: VlmrmError) -> Response:
    status, headers, body = error_answer(error)
    response = Response(body, status)
    for name, value in headers:
        response.headers.append(name, value)
    return response


async def _vlmrm_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, VlmrmError)
    return response_to(error)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Name the first error of the body, never its content, and how many more there are."""
    assert isinstance(error, RequestValidationError)
    # FastAPI's locations begin with "body".
    errors = one_of_each([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()], error.body)
    if errors[0]["type"] == "model_attributes_type" and "json" not in request.headers.get("content-type", "").lower():
        return response_to(InvalidRequest("the body is no JSON: send it as Content-Type: application/json.", 422))
    field = getattr(request.scope.get("route"), "body_field", None)
    kind = None if field is None else model_in(field.field_info.annotation)
    more = f", and {len(errors) - 1} more" if errors[1:] else ""
    return response_to(InvalidRequest(f"{describe_errors(errors, kind)}{more}.", 422))


def one_of_each(errors: Sequence[Any], body: Any) -> list[Any]:
    """Return pydantic's errors with one for each place in `body`, of the innermost value that fits no type."""
    found: dict[tuple[Any, ...], Any] = {}
    for error in errors:
        place, value = [], body
        for part in error["loc"]:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                if error["type"] != "missing" or part != error["loc"][-1]:
                    continue
            place.append(part)
        kept = found.setdefault(tuple(place), {**error, "loc": tuple(place) or ("the body",)})
        kind = error["msg"].removeprefix("Input should be ")
        if kind not in kept["msg"]:
            kept["msg"] += f" or {kind}"
    outer = {place[:length] for place in found for length in range(len(place))}
    return [error for place, error in found.items() if place not in outer]


async def _form_error(request: Request, error: Exception) -> Response:
    return response_to(InvalidRequest(f"the form cannot be read: {error}."))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    detail = str(error.detail)
    if not isinstance(error, HTTPException):  # of Starlette, which reads forms
        detail = PHRASES.get(error.status_code, f"the form cannot be read: {detail.rstrip('.')}.")
    response = response_to(InvalidRequest(detail, error.status_code))
    response.headers.update(error.headers or {})
    return response
