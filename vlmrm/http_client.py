"""What this project's clients of HTTP services share: addresses, what a server says, and when to ask it again.

Importing it needs neither torch nor an HTTP package.
"""

from __future__ import annotations

import ipaddress
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from vlmrm.errors import ConfigError, RewardError

BUSY = (429, 502, 503, 504)  # "not now": any other status will be the same next time
CONNECT_TIMEOUT = 10.0  # seconds
LONGEST_WAIT = 60.0  # seconds; a server that asks for more is given up
SAID = 300  # characters of a server's own words in a message


class Unavailable(RewardError):
    """A server that may answer later; `wait` is after how many seconds, where it said so."""

    def __init__(self, message: str, wait: float | None = None):
        super().__init__(message)
        self.wait = wait


class Unreachable(Unavailable):
    """A server that no connection leads to, or that broke it."""


@dataclass(frozen=True)
class Address:
    """`http://[user:password@]host:port[/path]`. `name` is it without credentials, which are in no message.

    `trust_env` says whether the proxies of the environment are asked; they cannot reach this machine's own addresses.
    """

    url: Any  # httpx2.URL, without credentials
    name: str
    auth: tuple[str, str] | None
    trust_env: bool

    def __repr__(self) -> str:
        return f"Address({self.name})"


def address_of(url: str, setting: str) -> Address:
    """Raises ConfigError, naming the setting, for what is no address of a server."""
    httpx = import_httpx()
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise ConfigError(f"a {setting} is no address: write it as http://host:port.") from None
    bare = address.copy_with(username=None, password=None)
    if address.scheme not in ("http", "https") or not address.host or address.query or address.fragment:
        kept = bare.copy_with(query=None, fragment=None)
        raise ConfigError(f"{setting} {kept} cannot be used: write http://host:port, and a path where it has one.")
    auth = (address.username, address.password) if address.userinfo else None
    return Address(bare, str(bare).rstrip("/"), auth, not is_loopback(address.host))


def import_httpx() -> Any:
    """The package that speaks HTTP.

    Raises:
        ConfigError: when it is not installed, with the command that does it.
    """
    try:
        import httpx2
        import stamina  # noqa: F401
    except ImportError:
        raise ConfigError(
            "asking a server needs httpx2 and stamina: pip install -e '.[client]' in vlmrm's folder."
        ) from None
    return httpx2


def ask_again(error: Exception, patience: float = math.inf) -> bool | float:
    """Whether to ask again, as `on` of stamina takes it: after so many seconds, or True where stamina knows better.

    Args:
        patience: seconds for which the caller goes on; a server that asks for as many, or for more than
            `LONGEST_WAIT`, is given up.
    """
    if not isinstance(error, Unavailable):
        return False
    wait = error.wait or 0.0
    if wait > LONGEST_WAIT or wait >= patience:
        return False
    return True if error.wait is None else wait


def unreachable(error: Exception, where: str) -> Unreachable:
    """Of an httpx2.TransportError."""
    return Unreachable(f"{where}: {shortened(str(error) or type(error).__name__)}")


def busy(answer: Any, where: str) -> Unavailable:
    """Of an httpx2.Response whose status is one of `BUSY`."""
    wait = retry_after(answer.headers.get("Retry-After"))
    return Unavailable(f"{where} answered {answer.status_code}: {said_by(answer)}", wait)


def retry_after(header: str | None) -> float | None:
    """Seconds from now, of a number of them or a date; None where there is neither."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # no date, or one without a zone
        return None


def said_by(answer: Any) -> str:
    """What a server says of an error, an httpx2.Response: its `error`, that one's `message`, or `detail`; else all."""
    try:
        said = answer.json()
    except ValueError:
        return shortened(answer.text)
    if isinstance(said, dict):
        said = said.get("error") or said.get("detail") or said
    if isinstance(said, dict):
        said = said.get("message") or said
    return shortened(said if isinstance(said, str) else json.dumps(said))


def shortened(text: str) -> str:
    """One line of text, not long."""
    text = " ".join(text.split())
    return f"{text[:SAID]}..." if len(text) > SAID else text or "(nothing)"


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, where no proxy leads."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
