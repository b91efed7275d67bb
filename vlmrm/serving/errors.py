"""The errors of the service, their HTTP statuses, and the one form of their responses.

The body is `{"error": {"message", "type"}}`, one sentence without paths, secrets or tracebacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from starlette.exceptions import HTTPException as StarletteHTTPException

from vlmrm.errors import RowError, VlmrmError
from vlmrm.serving.backend import QueueAway
from vlmrm.serving.service import NotServed, NotServing, TooLarge, UnknownReward
from vlmrm.serving.versions import CannotSwitch
from vlmrm.serving.worker.channel import redact_paths
from vlmrm.settings import describe_errors, model_in


class InvalidRequest(VlmrmError):
    """A request that is wrong however often it is sent."""


class Unauthorized(VlmrmError):
    """No token, or a wrong one."""

    def __init__(self) -> None:
        super().__init__("a token is needed: send it as Authorization: Bearer TOKEN.")


class Forbidden(VlmrmError):
    """The operator has not allowed it."""


class SlowBody(VlmrmError):
    """The body of a request did not come in time."""


class RewardFailed(VlmrmError):
    """The job was accepted and has no result."""


class TimedOut(VlmrmError):
    """The result did not come while the request waited."""


STATUS: dict[type[VlmrmError], int] = {
    InvalidRequest: 400,
    RowError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    UnknownReward: 404,
    SlowBody: 408,
    NotServed: 409,
    CannotSwitch: 409,
    TooLarge: 413,
    RewardFailed: 500,
    QueueAway: 503,
    NotServing: 503,
    TimedOut: 504,
}
DESCRIPTIONS: dict[int, str] = {422: "The body does not match its schema."} | {
    status: ", ".join(kind.__name__ for kind, code in STATUS.items() if code == status) for status in STATUS.values()
}
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
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(FormParserError, _form_error)  # before 1.8, Starlette lets it through


def error_of(error: VlmrmError) -> ErrorDetail:
    return ErrorDetail(message=redact_paths(str(error)), type=type(error).__name__)


def error_response(message: str, kind: str, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": redact_paths(message), "type": kind}}, status, headers)


def response_to(error: Exception) -> JSONResponse:
    # By `isinstance`: Overloaded is a QueueAway, MediaError a RowError.
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, (QueueAway, NotServing)):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    response = error_response(str(error), type(error).__name__, status, headers)
    if status == 401:
        response.headers.append("WWW-Authenticate", "Bearer")
        response.headers.append("WWW-Authenticate", 'Basic realm="vlmrm"')  # has a browser ask for the token
    return response


async def _vlmrm_error(request: Request, error: Exception) -> JSONResponse:
    return response_to(error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    """Name the first error of the body, never its content, and how many more there are."""
    assert isinstance(error, RequestValidationError)
    # FastAPI's locations begin with "body".
    errors = one_of_each([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()], error.body)
    if errors[0]["type"] == "model_attributes_type" and "json" not in request.headers.get("content-type", "").lower():
        return error_response("the body is no JSON: send it as Content-Type: application/json.", "InvalidRequest", 422)
    field = getattr(request.scope.get("route"), "body_field", None)
    kind = None if field is None else model_in(field.field_info.annotation)
    more = f", and {len(errors) - 1} more" if errors[1:] else ""
    return error_response(f"{describe_errors(errors, kind)}{more}.", "InvalidRequest", 422)


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


async def _form_error(request: Request, error: Exception) -> JSONResponse:
    return response_to(InvalidRequest(f"the form cannot be read: {error}."))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    kind = "TooLarge" if error.status_code == 413 else "InvalidRequest"
    message = str(error.detail) if isinstance(error, HTTPException) else PHRASES.get(error.status_code, error.detail)
    return error_response(message, kind, error.status_code, dict(error.headers or {}))
