"""HTTP clients: the address of a server, one call of it, and when it is asked again.

Importing it needs neither torch nor an HTTP package.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from vlmrm.errors import ConfigError, Denied, RewardError

REFUSED_STATUSES = (400, 413, 422)  # of an item
DENIED_STATUSES = (401, 403, 404)  # of a key, an address or a model
RETRIED_STATUSES = (429, 502, 503, 504)  # any other will be the same next time
CONNECT_TIMEOUT = 9.0  # seconds
FIRST_WAIT = 0.25  # seconds and up to as much again before another try, twice as long before each further one
LONGEST_PAUSE = 10.0  # seconds before another try
LONGEST_WAIT = 60.0  # seconds; if a server asks for more, the request fails
QUIET = 30.0  # seconds for which one reason of retries is not said again
CONNECTIONS = 256  # of one server, as many as the threads that ask it
MAX_CHARACTERS = 300  # of a server's message within ours

Result = TypeVar("Result")


class Unavailable(RewardError):
    """A server that may answer later; `wait` is its Retry-After in seconds, None without one.

    One that is `busy` works, and asks for patience: it is not down.
    """

    def __init__(self, message: str, wait: float | None = None, *, busy: bool = False):
        super().__init__(message)
        self.wait = wait
        self.busy = busy or wait is not None


class Unreachable(Unavailable):
    """A server that refused or broke the connection, or has answered nothing at all."""


class Overdue(RewardError):
    """A server that took a call and did not answer in time; asked again it would do the same work twice."""

    busy = False


class Refused(RewardError):
    """An item that a server refuses; the server itself works."""


class Server:
    """A server at `http://[user:password@]host:port[/path]`, and the connections to it of each process.

    Messages use `name`, the address without its credentials, and `setting`, which holds it. A `token` is sent as
    `Authorization: Bearer`, instead of those credentials. `connections` bounds the calls at a time.
    """

    def __init__(
        self,
        url: str,
        setting: str,
        token: str | None = None,
        *,
        connections: int = CONNECTIONS,
        transport: Any = None,
    ):
        import httpx2 as httpx  # which takes a while

        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            raise ConfigError(f"a {setting} is no address: write it as http://host:port.") from None
        bare = address.copy_with(username=None, password=None)
        if address.scheme not in ("http", "https") or not address.host or address.query or address.fragment:
            name = bare.copy_with(query=None, fragment=None)  # a query may hold a secret
            raise ConfigError(f"{setting} {name} cannot be used: write http://host:port, and a path where it has one.")
        self.name = str(bare).rstrip("/")
        self.origin = str(bare.copy_with(path="/"))
        self._clients: dict[int, Any] = {}
        self._options: dict[str, Any] = {
            "base_url": bare,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "auth": (address.username, address.password) if address.userinfo and not token else None,
            "trust_env": not is_loopback(address.host),  # a proxy of the environment cannot reach this machine
            "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            "transport": transport,
        }

    def __repr__(self) -> str:
        return f"Server({self.name})"

    @property
    def client(self) -> Any:
        """Return this process's httpx2.AsyncClient: a fork has none of its parent's connections."""
        import httpx2 as httpx

        process = os.getpid()
        if process not in self._clients:
            self._clients = {process: httpx.AsyncClient(**self._options)}
        return self._clients[process]

    async def aclose(self) -> None:
        """Close the connections; the next call opens them again."""
        if (client := self._clients.pop(os.getpid(), None)) is not None:
            await client.aclose()

    async def call(
        self, method: str, path: str, seconds: float, *, late: type[RewardError] = Overdue, **content: Any
    ) -> Any:
        """Return the httpx2.Response to one request; `content` are its keywords.

        Without a connection, or with a broken one, it is Unreachable; after `seconds` in all it is Overdue, or `late`.
        """
        import httpx2 as httpx

        where = f"{self.name}{path}"
        timeout = httpx.Timeout(seconds, connect=min(0.9 * seconds, CONNECT_TIMEOUT), pool=None)
        try:
            async with asyncio.timeout(seconds):  # httpx2's own is of the next byte
                return await self.client.request(method, path, timeout=timeout, **content)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            raise late(f"{where} did not answer in {seconds:g} s: raise timeout, or send less at a time") from None
        except httpx.TransportError as error:
            raise Unreachable(f"{where} cannot be reached ({_cause(error)})") from None
        except httpx.HTTPError as error:
            raise RewardError(f"{where}: {one_line(str(error))}") from None


async def retried(
    send: Callable[[float], Awaitable[Result]],
    *,
    attempts: int | None = None,
    seconds: float = math.inf,
    unreachable: float = math.inf,
    longest: float = LONGEST_WAIT,
    paced: Callable[[], bool] = lambda: False,
) -> Result:
    """Return what `send` returns; it is told the seconds left, and called again while it raises `Unavailable`.

    All calls, `attempts` at most, have `seconds`; while no connection is made, `unreachable` where that is less. A
    server that asks for a wait over `longest` is not asked again. `paced` returns whether a breaker makes the calls of
    a server that is down wait. The last error is raised with the number of calls.
    """
    import stamina

    logging.getLogger("stamina").addFilter(_say_once)
    started, tries = time.monotonic(), 0

    def again(error: Exception) -> bool | float:
        if not isinstance(error, Unavailable):
            return False
        patience = min(seconds, unreachable) if isinstance(error, Unreachable) else seconds
        if (wait := error.wait or 0.0) > longest or wait >= started + patience - time.monotonic():
            return False
        if error.wait is not None:
            return wait * random.uniform(1, 1.1)  # not all callers at once
        return 0.0 if not error.busy and paced() else True

    pause = min(LONGEST_PAUSE, seconds / 10)  # the last of them may exceed the time
    waits = {"wait_initial": FIRST_WAIT, "wait_jitter": FIRST_WAIT, "wait_max": pause}
    try:
        async for attempt in stamina.retry_context(on=again, attempts=attempts, timeout=None, **waits):
            with attempt:
                tries = attempt.num
                return await send(max(started + seconds - time.monotonic(), 0.1))
    except Unavailable as error:
        said = "asked once" if tries == 1 else f"asked {tries} times in {time.monotonic() - started:.0f} s"
        if error.wait is not None:
            said += f", and it wants {error.wait:.0f} s more"
        raise type(error)(f"{error} ({said})", error.wait, busy=error.busy) from None
    raise AssertionError("the last attempt returns or raises")


_said_at: dict[str, float] = {}


def _say_once(record: logging.LogRecord) -> bool:
    """Put the cause of a retry into stamina's message; of one server say it once, however many calls fail."""
    fields = vars(record)
    cause = re.fullmatch(r"Un(?:available|reachable)\((['\"])(.*)\1\)", str(fields.get("stamina.caused_by")))
    if cause is None:
        return True
    record.msg = f"{cause[2]}: asking again in {fields['stamina.wait_for']:g} s"
    server, now = cause[2].partition(" ")[0], time.monotonic()
    told = now < _said_at.get(server, -math.inf) + QUIET
    _said_at[server] = _said_at[server] if told else now
    return not told


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return what `coroutine` returns on the event loop of calls; cancel it when this thread is interrupted.

    A connection belongs to one event loop. All calls of a process share one that never ends, in a thread, so that any
    thread can make them, also one with a running loop.
    """
    with _lock:
        if (loop := _loops.get(os.getpid())) is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="vlmrm-http", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork copies this, but no threads


def _cause(error: BaseException) -> str:
    """Return the system's reason of a failed connection, which an asynchronous client's own message leaves out."""
    text = str(error) or type(error).__name__
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else one_line(text)


def read_json(response: Any) -> Any:
    """Return the JSON of an httpx2.Response, integers as floats: one of a million digits becomes infinite."""
    check_status(response)
    try:
        return json.loads(response.content, parse_int=float)
    except (ValueError, RecursionError):
        raise RewardError(f"{response.url} did not answer with JSON: {error_text(response)}") from None


def check_status(response: Any, retried: Collection[int] = RETRIED_STATUSES) -> None:
    """Raise the error of a status: Unavailable where a retry may help, Refused of an item, Denied of all items."""
    status = response.status_code
    if response.is_success:
        return
    if response.is_redirect:
        raise RewardError(f"{response.url} answered {status}, a redirect: give the address it leads to")
    reason = f"{response.url} answered {status}: {error_text(response)}"
    if status in retried:
        raise Unavailable(reason, retry_after(response.headers.get("Retry-After")), busy=status == 429)
    raise (Refused if status in REFUSED_STATUSES else Denied if status in DENIED_STATUSES else RewardError)(reason)


def retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None without one, or for a date, which no server of ours sends."""
    try:
        return max(0.0, float(header or ""))
    except ValueError:
        return None


def error_text(response: Any) -> str:
    """Return the message of an error response: its `error`, that one's `message`, or `detail`; else the body."""
    text = without_token(response)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return one_line(text)
    if isinstance(content, dict):
        content = content.get("error") or content.get("detail") or content
    if isinstance(content, dict):
        content = content.get("message") or content
    return one_line(content if isinstance(content, str) else json.dumps(content))


def without_token(response: Any) -> str:
    """Return the body of a response, without the token of the request, which it may repeat."""
    token = response.request.headers.get("Authorization", "").rpartition(" ")[2]
    return response.text.replace(token, "<token>") if token else response.text


def one_line(text: str) -> str:
    """Return a text as one line of at most `MAX_CHARACTERS`."""
    text = " ".join(text.split())
    return f"{text[:MAX_CHARACTERS]}..." if len(text) > MAX_CHARACTERS else text or "(nothing)"


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
