"""HTTP clients: the address of a server, its errors as ours, and when a request is worth retrying.

Importing it needs neither torch nor an HTTP package.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

from vlmrm.errors import ConfigError, Denied, RewardError

REFUSED_STATUSES = (400, 413, 422)  # of an item
DENIED_STATUSES = (401, 403, 404)  # of a key, an address or a model
RETRIED_STATUSES = (429, 502, 503, 504)  # any other will be the same next time
CONNECT_TIMEOUT = 9.0  # seconds
FIRST_WAIT = 0.5  # seconds before another try
LONGEST_WAIT = 60.0  # seconds; if a server asks for more, the request fails
MAX_CHARACTERS = 300  # of a server's message within ours


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


class Refused(RewardError):
    """An item that a server refuses; the server itself works."""


class ServerAddress:
    """The address `http://[user:password@]host:port[/path]` of a server, and clients of it.

    Messages use `name`, the address without its credentials.

    Args:
        setting: name of the setting that holds the address, for messages.
        token: sent as `Authorization: Bearer`, instead of the address's credentials.
    """

    def __init__(self, url: str, setting: str, token: str | None = None):
        httpx = import_httpx()
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
        self._options = {
            "base_url": bare,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "auth": (address.username, address.password) if address.userinfo and not token else None,
            "trust_env": not is_loopback(address.host),  # a proxy of the environment cannot reach this machine
        }

    def __repr__(self) -> str:
        return f"ServerAddress({self.name})"

    def client(self, timeout: float) -> Any:
        """Return an httpx2.Client that waits `timeout` seconds for a response."""
        return import_httpx().Client(**self._options, timeout=timeouts(timeout))

    def async_client(self, timeout: float, connections: int, transport: Any = None) -> Any:
        """Return an httpx2.AsyncClient with at most so many connections; `transport` replaces the network in tests."""
        httpx = import_httpx()
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx.AsyncClient(**self._options, timeout=timeouts(timeout), limits=limits, transport=transport)


def timeouts(seconds: float) -> Any:
    """Return the httpx2.Timeout of a request; waiting for a free connection of the pool does not count."""
    return import_httpx().Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT), pool=None)


@contextmanager
def translate_http_errors(where: str, late: RewardError) -> Generator[None]:
    """Turn httpx2's errors about a request into ours."""
    httpx = import_httpx()
    try:
        yield
    except (httpx.ReadTimeout, httpx.WriteTimeout):
        raise late from None
    except httpx.TransportError as error:
        raise Unreachable(f"{where} cannot be reached ({_cause(error)})") from None
    except httpx.HTTPError as error:
        raise RewardError(f"{where}: {one_line(str(error))}") from None


def _cause(error: BaseException) -> str:
    """Return the system's reason of a failed connection, which an asynchronous client's own message leaves out."""
    text = str(error) or type(error).__name__
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else one_line(text)


def read_json_response(response: Any, where: str) -> Any:
    """Return the JSON of an httpx2.Response, integers as floats: one of a million digits becomes infinite."""
    status = response.status_code
    if status in RETRIED_STATUSES:
        wait = retry_after(response.headers.get("Retry-After"))
        raise Unavailable(f"{where} answered {status}: {error_text(response)}", wait, busy=status == 429)
    if response.is_redirect:
        raise RewardError(f"{where} answered {status}, a redirect: give the address it leads to")
    if not response.is_success:
        raise refusal(status, f"{where} answered {status}: {error_text(response)}")
    try:
        return json.loads(response.content, parse_int=float)
    except (ValueError, RecursionError):
        raise RewardError(f"{where} did not answer with JSON: {error_text(response)}") from None


def refusal(status: int, reason: str) -> RewardError:
    """Return the error of a status that no retry mends: Refused of an item, Denied of all, else a RewardError."""
    return (Refused if status in REFUSED_STATUSES else Denied if status in DENIED_STATUSES else RewardError)(reason)


def import_httpx() -> Any:
    """Return the module httpx2, which takes a while to import."""
    import httpx2

    return httpx2


def retry_delay(error: Exception, patience: float = math.inf) -> bool | float:
    """Return whether to retry, for stamina's `on`: False, the seconds to wait, or True for stamina's own backoff.

    Args:
        patience: seconds left to the caller; a server that asks for more, or for more than `LONGEST_WAIT`, is not
            asked again.
    """
    if not isinstance(error, Unavailable):
        return False
    wait = error.wait or 0.0
    if wait > LONGEST_WAIT or wait >= patience:
        return False
    return True if error.wait is None else wait


def wait_seconds(error: Unavailable, tries: int, jitter: float, longest: float) -> float:
    """Return the seconds before the next try, after `tries` of them.

    The server's `Retry-After`, otherwise twice as long each time; `jitter` in [0, 1) spreads the callers.
    """
    if error.wait is not None:
        return error.wait + FIRST_WAIT * jitter
    return min(longest, FIRST_WAIT * 2 ** (tries - 1)) * (1 + jitter) / 2


def retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None without a valid one."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # not a date, or one without a time zone
        return None


def error_text(response: Any) -> str:
    """Return the message of an error response: its `error`, that one's `message`, or `detail`; else the body."""
    try:
        content = response.json()
    except ValueError:
        return one_line(response.text)
    if isinstance(content, dict):
        content = content.get("error") or content.get("detail") or content
    if isinstance(content, dict):
        content = content.get("message") or content
    return one_line(content if isinstance(content, str) else json.dumps(content))


def one_line(text: str) -> str:
    """Return a text as one line of at most `MAX_CHARACTERS`."""
    text = " ".join(text.split())
    return f"{text[:MAX_CHARACTERS]}..." if len(text) > MAX_CHARACTERS else text or "(nothing)"


@cache
def hub_answers() -> bool:
    """Return whether the hub of models and data sets can be reached, by one request for the process.

    Its own client would try for half a minute before each file.
    """
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=CONNECT_TIMEOUT)
    except httpx.HTTPError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
