"""A service behind one or several addresses: is it ready, who is asked next, and when it is worth asking again."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from vlmrm.errors import RewardError
from vlmrm.http import Server, Unavailable, ask_again, json_of, request_to

logger = logging.getLogger("vlmrm")

REST = 10.0  # seconds for which a server that failed is asked last
HEALTH_TIMEOUT = 5.0


class Endpoint:
    """One address. `name` is it without credentials."""

    def __init__(self, url: str, timeout: float):
        server = Server(url, "server_url")
        self.name = server.name
        self.busy = 0
        self.last_turn = 0
        self.rests_until = 0.0
        self.client = server.client(timeout)

    def healthy(self) -> str | None:
        """None, or why it cannot be asked now."""
        where = f"{self.name}/health"
        try:
            with request_to(where, RewardError(f"{where} was silent for {HEALTH_TIMEOUT:g} s")):
                status = self.client.get("/health", timeout=HEALTH_TIMEOUT).status_code
        except RewardError as error:
            return str(error)
        return None if status < 400 else f"{where} answered {status}"

    def post(self, path: str, body: bytes) -> Any:
        """The JSON that it answers to a JSON `body`.

        Raises:
            Unavailable: when asking again can help.
            RewardError: when it cannot.
        """
        where = f"{self.name}{path}"
        # Asked again it would do the same work twice.
        late = f"{where} was silent for {self.client.timeout.read:g} s: raise timeout, or lower batch_size"
        with request_to(where, RewardError(late)):
            answer = self.client.post(path, content=body, headers={"Content-Type": "application/json"})
        return json_of(answer, where)


class Endpoints:
    """Servers that do the same: each request goes to the least busy one, and to the next where one fails.

    Args:
        urls: their addresses, `http://[user:password@]host:port[/path]`.
        timeout: seconds to connect, and of silence while one works.
        attempts: how often all of them are asked before giving up; between two times the client waits, longer each
            time, or as long as a server asks for (`Retry-After`).
    """

    def __init__(self, urls: Sequence[str], *, timeout: float, attempts: int):
        self.endpoints = [Endpoint(url, timeout) for url in urls]
        self.attempts = attempts
        self._lock = threading.Lock()
        self._turns = itertools.count(1)

    def wait_until_ready(self, seconds: float) -> None:
        """Returns when at least one server is; those that are not are asked last for a while.

        Raises:
            RewardError: when after `seconds` none is, with the reasons.
        """

        def ask() -> None:
            reasons = {endpoint: endpoint.healthy() for endpoint in self.endpoints}
            unready = {endpoint: reason for endpoint, reason in reasons.items() if reason is not None}
            for endpoint in unready:
                self._rest(endpoint)
            said = "; ".join(unready.values())
            if len(unready) == len(self.endpoints):
                raise Unavailable(f"no reward server is ready ({said}): start it, or set wait_seconds to wait for it")
            if unready:
                logger.warning("going on without %d of %d reward servers (%s)", len(unready), len(reasons), said)

        _repeat(ask, attempts=None if seconds else 1, timeout=seconds or None, wait_max=2.0)

    def post(self, path: str, body: bytes) -> Any:
        """The JSON that the first server able to answers.

        Raises:
            RewardError: when none is, or one says that the request is wrong.
        """
        try:
            return _repeat(lambda: self._post_to_any(path, body), self.attempts, timeout=None, wait_max=10.0)
        except Unavailable as error:
            times = "once" if self.attempts == 1 else f"up to {self.attempts} times"
            raise RewardError(f"{error} (asked {times})") from None

    def _post_to_any(self, path: str, body: bytes) -> Any:
        tried: dict[Endpoint, Unavailable] = {}
        while len(tried) < len(self.endpoints):
            with self._next(tried) as endpoint:
                try:
                    return endpoint.post(path, body)
                except Unavailable as error:
                    self._rest(endpoint)
                    tried[endpoint] = error
        waits = [error.wait for error in tried.values() if error.wait is not None]
        wait = min(waits) if len(waits) == len(tried) else None
        raise Unavailable("; ".join(str(error) for error in tried.values()), wait)

    @contextmanager
    def _next(self, tried: dict[Endpoint, Unavailable]) -> Generator[Endpoint]:
        """The server to ask: none that rests, then the least busy, then the one whose turn is longest ago."""
        with self._lock:
            now = time.monotonic()
            endpoint = min(
                (endpoint for endpoint in self.endpoints if endpoint not in tried),
                key=lambda each: (each.rests_until > now, each.busy, each.last_turn),
            )
            endpoint.busy += 1
            endpoint.last_turn = next(self._turns)
        try:
            yield endpoint
        finally:
            with self._lock:
                endpoint.busy -= 1

    def _rest(self, endpoint: Endpoint) -> None:
        with self._lock:
            endpoint.rests_until = time.monotonic() + REST


def _repeat(ask: Callable[[], Any], attempts: int | None, timeout: float | None, wait_max: float) -> Any:
    import stamina

    for attempt in stamina.retry_context(on=ask_again, attempts=attempts, timeout=timeout, wait_max=wait_max):
        with attempt:
            return ask()
