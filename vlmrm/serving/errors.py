"""The errors of the service, their HTTP statuses, and the one form of their answers.

The body is `{"error": {"message", "type"}}`, one sentence without paths, secrets or tracebacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlmrm.errors import RowError, VlmrmError
from vlmrm.serving.backend import Overloaded, QueueAway
from vlmrm.serving.worker.channel import redact_paths


class InvalidRequest(VlmrmError):
    """A request that is wrong however often it is sent."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Unauthorized(VlmrmError):
    """No token, or a wrong one."""

    def __init__(self, message: str = "a token is needed: send it as Authorization: Bearer TOKEN."):
        super().__init__(message)


class Forbidden(VlmrmError):
    """The operator has not allowed it."""


class UnknownReward(VlmrmError):
    """No reward of that name is served."""


class SlowBody(VlmrmError):
    """The body of a request did not come in time."""


class NotServed(VlmrmError):
    """The revision that a request demands is not served."""


class CannotSwitch(VlmrmError):
    """Another model cannot take a reward's place; the one that is served stays."""


class TooLarge(VlmrmError):
    """A request too large even for an empty queue."""


class RewardFailed(VlmrmError):
    """The job was accepted and has no result."""


class Busy(QueueAway):
    """The service itself has more requests than it can answer in time."""


class NotServing(VlmrmError):
    """The service is stopping, or the reward cannot be loaded; a retry after `retry_after` seconds may succeed."""

    retry_after = 5.0


class InternalError(VlmrmError):
    """The service has a fault."""


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
    InternalError: 500,
    QueueAway: 503,
    NotServing: 503,
    TimedOut: 504,
}
DESCRIPTIONS: dict[int, str] = {422: "The body does not match its schema."} | {
    status: ", ".join(kind.__name__ for kind, code in STATUS.items() if code == status) for status in STATUS.values()
}
KINDS = {kind.__name__: kind for kind in (*STATUS, Overloaded, Busy)}


def error_content(message: str, kind: str) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    return {"error": {"message": redact_paths(message), "type": kind}}


def error_answer(error: VlmrmError) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return the status, the headers and the body of the answer that is an error."""
    # By `isinstance`: Overloaded is a QueueAway, MediaError a RowError.
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    status = getattr(error, "status", status)
    headers = [("content-type", "application/json")]
    if status == 503:
        headers.append(("retry-after", str(max(1, round(getattr(error, "retry_after", 1.0))))))
    if status == 401:
        headers.append(("www-authenticate", "Bearer"))
        headers.append(("www-authenticate", 'Basic realm="vlmrm"'))  # has a browser ask for the token
    return status, headers, json.dumps(error_content(str(error), type(error).__name__)).encode()


def write_error(error: VlmrmError) -> dict[str, Any]:
    """Return an error as it goes from the core to a handler."""
    return {"type": type(error).__name__, "message": str(error), "retry_after": getattr(error, "retry_after", 0.0)}


def read_error(content: Mapping[str, Any]) -> VlmrmError:
    """Return the error that the core has sent."""
    kind = KINDS.get(content["type"], RewardFailed)
    error = kind.__new__(kind)
    VlmrmError.__init__(error, content["message"])
    error.retry_after = content["retry_after"]  # ty: ignore[missing-attribute]
    return error
