"""The service's log: a line for each event, with the id of the request that it belongs to, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


class LineFormatter(logging.Formatter):
    """One line a record: `2026-01-01T00:00:00Z info request status=200 ms=3.1 request_id=...`, or the same as JSON.

    A record's `fields` are figures beside its message. Line ends in texts are escaped, so that nobody can forge a
    line; a traceback is a field of the JSON, and in text the only thing that takes more lines.
    """

    def __init__(self, as_json: bool):
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if (request_id := REQUEST_ID.get()) is not None:
            fields["request_id"] = request_id
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level, message = record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self.as_json:
            whole = {"time": moment, "level": level, "message": message, **fields}
            return json.dumps(whole if trace is None else {**whole, "traceback": trace}, default=str)
        line = " ".join([moment, level, message, *(f"{name}={value}" for name, value in fields.items())])
        line = line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        return line if trace is None else f"{line}\n{trace}"


def format_lines(logger: logging.Logger, as_json: bool) -> None:
    """Has every handler of `logger` write such lines."""
    for handler in logger.handlers:
        handler.setFormatter(LineFormatter(as_json))
