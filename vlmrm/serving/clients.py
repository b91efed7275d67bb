"""Who asks: a client of `[[clients]]`, whoever sends the service's token, or an address; what each opens, and asks."""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from ipaddress import ip_address

from vlmrm.data.media import image_size
from vlmrm.serving.settings import OTHER, ServiceSettings

HOPS = 8  # that are read of an X-Forwarded-For
ENDS = 512  # bytes at both ends of a body in which its reward is looked for
MODEL = re.compile(rb'"(?:model|reward)"\s*:\s*"([^"\\]{1,100})"')


@dataclass(frozen=True)
class Client:
    """Who sends a request, and what it opens."""

    name: str = ""  # whose fair shares it counts against: of `[[clients]]`, or an address; never of a token
    rewards: tuple[str, ...] = ()
    service: bool = False  # whether it opens what concerns the whole service
    admin: bool = False  # whether it changes models
    weight: float = 1.0
    label: str = OTHER  # in metrics: the name, where that is configured

    def lane(self, path: str, body: bytes | bytearray) -> str:
        """Return what shares turns with a request: what this client sends to that one of its rewards, as it seems."""
        named = MODEL.findall(body[:ENDS]) + MODEL.findall(body[-ENDS:])
        names = [path[1:].partition("/")[0], *(name.decode(errors="replace") for name in named)]
        return f"{self.name} {next((name for name in names if name in self.rewards), '')}"


class Clients:
    """The clients of a service; it is `open` where its settings have no token, and each address is one then."""

    def __init__(self, settings: ServiceSettings):
        self._rewards = tuple(reward.name for reward in settings.reward_args)
        self._named: list[tuple[bytes, Client]] = []
        for one in settings.callers:
            rewards = tuple(name for name in self._rewards if name in (one.rewards or self._rewards))
            client = Client(one.name, rewards, service=not one.rewards, weight=one.weight, label=one.name)
            self._named.append((one.token.get_secret_value().encode(), client))
        self._admin = settings.admin_token.get_secret_value().encode()
        self._proxies = settings.trusted_proxies
        self.open = not self._named

    def identify(self, headers: Mapping[bytes, bytes], peer: str) -> Client | None:
        """Return who asks, by headers in lower case and the socket's address; None for one who opens nothing."""
        token = _token(headers)
        found = [client for secret, client in self._named if compare_digest(token, secret)]  # no early exit
        is_admin = bool(self._admin) and compare_digest(token, self._admin)
        if found:
            return replace(found[0], admin=is_admin)
        if not (is_admin or self.open):
            return None
        return Client(self._address(headers, peer), self._rewards if self.open else (), self.open, is_admin)

    def _address(self, headers: Mapping[bytes, bytes], peer: str) -> str:
        """Return the address that asks: `peer`, or the nearest before a chain of trusted proxies."""
        hops = headers.get(b"x-forwarded-for", b"").decode("latin-1").rsplit(",", HOPS)
        with suppress(ValueError):  # no address: of a socket file, or what a proxy calls unknown
            while hops and any(ip_address(peer) in network for network in self._proxies):
                peer = str(ip_address(hops.pop().strip()))
        return peer


def _token(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the token of a request: Bearer, or of Basic, for clients with only a URL, the password, else the user."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"basic":
        with suppress(ValueError):
            user, _, password = base64.b64decode(value, validate=True).partition(b":")
            return password or user
    return value.strip() if scheme.lower() == b"bearer" else b""


@dataclass
class RequestContext:
    """What every step of a request may ask for; the moments are of `time.monotonic`, which all processes share."""

    id: str = ""
    client: Client = field(default_factory=Client)
    deadline: float = math.inf  # after which its client waits no longer
    body_bytes: int = 0
    wanted: str = ""  # the revision that must compute its scores
    sizes: dict[bytes, tuple[int, int]] = field(default_factory=dict, repr=False)  # width and height of its pictures
    revisions: dict[str, str] = field(default_factory=dict)  # that computed its scores, by reward
    arrived: float = field(default_factory=time.monotonic)
    release: Callable[[], None] = lambda: None  # says that it waits, so that the next request can be worked on


_CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def begin_request(context: RequestContext) -> None:
    _CURRENT.set(context)


def current_request() -> RequestContext:
    """Return the context of the request that is being handled; outside of one, an empty one."""
    return _CURRENT.get() or RequestContext()


def picture_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a picture, read once in a request."""
    sizes = current_request().sizes
    if data not in sizes:
        sizes[data] = image_size(data)
    return sizes[data]
