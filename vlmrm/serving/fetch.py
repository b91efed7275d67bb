"""Images by http(s) URL, from hosts that the operator allows and from nowhere else.

`allowed_hosts` holds `NAME[:PORT][@NETWORK]`. A name may only lead to public addresses; in a private network it needs
the network, `images.internal@10.0.0.0/8`, or the URL names an address that is allowed itself. A name is resolved once
and the connection goes to that very address, so that nothing can change between the check and the use. Redirects are
followed, `REDIRECTS` at most, each checked like the first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from vlmrm.data.media import image_size
from vlmrm.errors import ConfigError, MediaError
from vlmrm.serving.settings import Limits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

REDIRECTS = 3
AT_ONCE = 16  # images that are fetched at the same time
PORTS = {"http": 80, "https": 443}
ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?(?:@(?P<network>[0-9A-Fa-f:./]+))?"
)
# They embed IPv4 addresses, which need not be public even where these are.
EMBEDDING = [
    ipaddress.ip_network(one) for one in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
]


class Remote(str):
    """The URL of an image that is still to be fetched; nothing that a request holds can be mistaken for one."""


@dataclass(frozen=True)
class AllowedHost:
    """One entry of `allowed_hosts`; without a port, that of the URL's scheme."""

    name: str
    port: int | None
    network: Network | None

    @classmethod
    def parse(cls, entry: str) -> AllowedHost:
        """Raises ConfigError for what is no entry."""
        found = ENTRY.fullmatch(entry)
        try:
            if found is None:
                raise ValueError
            network = None if found["network"] is None else ipaddress.ip_network(found["network"])
        except ValueError:
            raise ConfigError(
                f"allowed_hosts: {entry!r} is not NAME[:PORT][@NETWORK]: write images.org, say."
            ) from None
        port = None if found["port"] is None else int(found["port"])
        return cls(_canonical(found["name"]), port, network)

    def allows(self, url: httpx.URL) -> bool:
        port = PORTS[url.scheme] if url.port is None else url.port
        wanted = PORTS[url.scheme] if self.port is None else self.port
        return self.name == _canonical(url.host) and port == wanted

    def leads_to(self, address: Address) -> bool:
        """Whether the name may be resolved to this address."""
        if self.network is not None:
            return address in self.network
        return str(address) == self.name or is_public(address)


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet: not private, local, shared, reserved, multicast or embedding one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in EMBEDDING):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class Fetcher:
    """Fetches images in the event loop that uses it.

    Args:
        allowed_hosts: entries as above; none: nothing is fetched.
    """

    def __init__(self, allowed_hosts: Sequence[str], limits: Limits):
        self.allowed = [AllowedHost.parse(entry) for entry in allowed_hosts]
        self.limits = limits
        self._places = asyncio.Semaphore(AT_ONCE)

    def remote(self, url: str) -> Remote:
        """The image at `url`, checked as far as it can be without the network; raises MediaError."""
        self._host(_parsed(url))
        return Remote(url)

    async def image(self, remote: Remote) -> dict[str, bytes]:
        """The image's file, checked by its header.

        Raises:
            MediaError: saying what is wrong, without what a network that is not the client's answered.
        """
        try:
            async with self._places:
                data = await asyncio.wait_for(self._get(_parsed(remote)), self.limits.fetch_timeout)
        except TimeoutError:
            raise MediaError(f"the image at its URL did not come in {self.limits.fetch_timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise MediaError(f"the image at its URL cannot be fetched ({type(error).__name__})") from error
        width, height = image_size(data)
        if width * height > self.limits.max_pixels:
            raise MediaError(f"an image is {width}x{height} pixels, over the limit of {self.limits.max_pixels}")
        return {"bytes": data}

    def _host(self, url: httpx.URL) -> AllowedHost:
        for host in self.allowed:
            if host.allows(url):
                return host
        raise MediaError("the URL of an image is of a host that is not in allowed_hosts: send a data URI")

    async def _get(self, url: httpx.URL) -> bytes:
        # No proxy of the environment, which would resolve the name again; no cookies and no connection kept, which
        # might lead to another address than the one that was checked. How long it may take, `image` knows.
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            for _ in range(1 + REDIRECTS):
                client.cookies.clear()
                answer = await self._ask(client, url)
                if isinstance(answer, bytes):
                    return answer
                url = answer
        raise MediaError(f"the URL of an image redirects more than {REDIRECTS} times")

    async def _ask(self, client: httpx.AsyncClient, url: httpx.URL) -> bytes | httpx.URL:
        """The body, or where it is."""
        address = await self._address(self._host(url), url)
        request = client.build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers={"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.host},  # the certificate must be the name's
        )
        response = await client.send(request, stream=True)
        try:
            if response.is_redirect:
                return _parsed(str(url.join(response.headers["location"])))
            if response.status_code != 200:
                raise MediaError(f"the URL of an image answers with status {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise MediaError("the URL of an image answers with a compressed body")
            return await self._read(response)
        finally:
            await response.aclose()

    async def _address(self, host: AllowedHost, url: httpx.URL) -> Address:
        port = PORTS[url.scheme] if url.port is None else url.port
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(one[4][0]) for one in found]
        if not addresses or not all(map(host.leads_to, addresses)):
            raise MediaError("the URL of an image leads to an address that is not allowed")
        return addresses[0]

    async def _read(self, response: httpx.Response) -> bytes:
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > self.limits.max_image_bytes:
                raise MediaError(f"the image at its URL is over the limit of {self.limits.max_image_bytes} bytes")
        return bytes(data)


async def fetched(tree: Any, fetcher: Fetcher) -> Any:
    """A tree of an item with each `Remote` in it fetched, all at the same time; raises MediaError as `image` does."""
    remotes: dict[Remote, Any] = dict.fromkeys(_remotes(tree))
    tasks = [asyncio.ensure_future(fetcher.image(remote)) for remote in remotes]
    try:
        remotes.update(zip(remotes, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
    return _replaced(tree, remotes) if remotes else tree


def _remotes(tree: Any) -> list[Remote]:
    if isinstance(tree, Remote):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [remote for value in values for remote in _remotes(value)]


def _replaced(tree: Any, found: dict[Remote, Any]) -> Any:
    if isinstance(tree, Remote):
        return found[tree]
    if isinstance(tree, dict):
        return {name: _replaced(value, found) for name, value in tree.items()}
    return [_replaced(value, found) for value in tree] if isinstance(tree, list) else tree


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise MediaError("the URL of an image is broken") from error
    if parsed.scheme not in PORTS or not parsed.host:
        raise MediaError("the URL of an image is neither http nor https")
    if parsed.userinfo:
        raise MediaError("the URL of an image has a user in it, which is not sent")
    return parsed


def _canonical(name: str) -> str:
    name = name.lower().strip("[]").rstrip(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
