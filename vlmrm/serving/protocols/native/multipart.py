"""`POST /v1/rewards` as multipart/form-data: the JSON as the part `request`, media as files beside it.

A file's name in the form is its name in the JSON: `-F cat=@cat.png` is `attachment:cat`. It saves the third that
base64 adds, and its decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Message

from vlmrm.serving.refusals import InvalidRequest
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import StrictRoute

JSON_PART = "request"
DESCRIPTION: dict[str, Any] = {
    "requestBody": {
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [JSON_PART],
                    "properties": {
                        JSON_PART: {"type": "string", "description": "The JSON; media may be `attachment:NAME`."}
                    },
                    "additionalProperties": {"type": "string", "format": "binary", "description": "The file NAME."},
                }
            }
        }
    }
}


class MultipartRoute(StrictRoute):
    """A route of JSON that takes multipart/form-data as well; its files are `request.state.attachments`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def either(request: Request) -> Response:
            body, attachments = None, {}
            if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                body, attachments = await _parts(request, request.app.state.serving.settings.limits)
                request = _json_request(request, body)
            request.state.attachments = attachments
            return await handle(request)

        return either


async def _parts(request: Request, limits: Limits) -> tuple[bytes, dict[str, bytes]]:
    """The JSON and the files by name.

    Raises:
        InvalidRequest: for a form without JSON, with two parts of one name, or that is none.
    """
    parser = MultiPartParser(
        request.headers,
        request.stream(),
        max_files=limits.max_items + 1,
        max_fields=1,
        max_part_size=limits.max_body_bytes,
    )
    parser.spool_max_size = limits.max_body_bytes  # nothing of a request goes to a disk, which may be full
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message.rstrip('.')}.") from error
    parts: dict[str, bytes] = {}
    for name, value in form.multi_items():
        if name in parts:
            raise InvalidRequest(f"the form has two parts called {name[:60]!r}: give each a name of its own.")
        parts[name] = value.encode("utf-8", "replace") if isinstance(value, str) else await value.read()
    await form.close()
    if JSON_PART not in parts:
        raise InvalidRequest(f"the form has no part {JSON_PART}: send the JSON as one.")
    return parts.pop(JSON_PART), parts


def _json_request(request: Request, body: bytes) -> Request:
    """The same request with `body` as its JSON."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    whole = False

    async def receive() -> Message:
        nonlocal whole
        if whole:
            return await request.receive()
        whole = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}, receive)
