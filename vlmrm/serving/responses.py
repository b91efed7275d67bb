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
    # Before 1.8, Starlette lets the last one through.
    for kind in (VlmrmError, RequestValidationError, StarletteHTTPException, FormParserError):
        app.add_exception_handler(kind, _respond)


def error_of(error: VlmrmError) -> ErrorDetail:
    return ErrorDetail(message=redact_paths(str(error)), type=type(error).__name__)


def response_to(error: VlmrmError) -> Response:
    status, headers, body = error_answer(error)
    response = Response(body, status)
    for name, value in headers:
        response.headers.append(name, value)
    return response


async def _respond(request: Request, error: Exception) -> Response:
    response = response_to(error if isinstance(error, VlmrmError) else _explained(request, error))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _explained(request: Request, error: Exception) -> InvalidRequest:
    """Return an error of FastAPI or Starlette in the service's words."""
    if isinstance(error, RequestValidationError):
        return _validation_error(request, error)
    if not isinstance(error, StarletteHTTPException):
        return InvalidRequest(f"the form cannot be read: {error}.")
    detail = str(error.detail)
    if not isinstance(error, HTTPException):  # of Starlette, which reads forms
        detail = PHRASES.get(error.status_code, f"the form cannot be read: {detail.rstrip('.')}.")
    return InvalidRequest(detail, error.status_code)


def _validation_error(request: Request, error: RequestValidationError) -> InvalidRequest:
    """Name the first error of the body, never its content, and how many more there are."""
    # FastAPI's locations begin with "body".
    errors = one_of_each([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()], error.body)
    if errors[0]["type"] == "model_attributes_type" and "json" not in request.headers.get("content-type", "").lower():
        return InvalidRequest("the body is no JSON: send it as Content-Type: application/json.", 422)
    field = getattr(request.scope.get("route"), "body_field", None)
    kind = None if field is None else model_in(field.field_info.annotation)
    more = f", and {len(errors) - 1} more" if errors[1:] else ""
    return InvalidRequest(f"{describe_errors(errors, kind)}{more}.", 422)


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
