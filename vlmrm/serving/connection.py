"""One HTTP connection of uvicorn, which alone would wait for a request's headers for ever and let them grow."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vlmrm.private_names import relies_on

relies_on(
    HttpToolsProtocol,
    *("send_400_response", "connection_made", "connection_lost", "data_received"),
    *("on_message_begin", "on_headers_complete"),
    attributes=("loop", "transport"),
)

HEADER_BYTES = 64 * 2**10
HEADER_S = 15.0


class GuardedConnection(HttpToolsProtocol):
    """Closes a connection whose request line and headers are not whole after `HEADER_S`, or over `HEADER_BYTES`."""

    _timer: asyncio.TimerHandle | None = None
    _read = 0  # bytes of the headers that are not whole yet

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None:
            return
        self._read += len(data)
        if self._read > HEADER_BYTES:
            self.send_400_response("The headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # another request of a connection that is kept
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _await_headers(self) -> None:
        self._read = 0
        self._timer = self.loop.call_later(HEADER_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
