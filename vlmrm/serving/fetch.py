"""Images by http(s) URL, from hosts that the operator allows and no others.

`allowed_hosts` holds `NAME[:PORT][@NETWORK]`. A name may only lead to public addresses; in a private network it needs
the network, `images.internal@10.0.0.0/8`, or the URL names an address that is allowed itself. A name is resolved once
and the connection goes to that very address, so that nothing can change between the check and the use. At most
`REDIRECTS` redirects are followed, each checked like the first URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from vlmrm.errors import ConfigError, MediaError
from vlmrm.serving.event_loop import in_thread, picture_size
from vlmrm.serving.settings import Limits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

REDIRECTS = 3
CONCURRENCY = 16  # images that are fetched at the same time
PORTS = {"http": 80, "https": 443}
ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?(?:@(?P<network>[0-9A-Fa-f:./]+))?"
)
# They embed IPv4 addresses, which need not be public even where these are.
EMBEDDING = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")))


class RemoteImage(str):
    """The URL of an image that is still to be fetched. No text of a request can be of this type."""


@dataclass(frozen=True)
class AllowedHost:
    """One entry of `allowed_hosts`; without a port, that of the URL's scheme."""

    name: str
    port: int | None
    network: Network | None

    @classmethod
    def parse(cls, entry: str) -> AllowedHost:
        """Return the entry; raises ConfigError for an invalid one."""
        match = ENTRY.fullmatch(entry)
        try:
            if match is None:
                raise ValueError
            network = None if match["network"] is None else ipaddress.ip_network(match["network"])
        except ValueError:
            raise ConfigError(
                f"allowed_hosts: {entry!r} is not NAME[:PORT][@NETWORK]: write images.org, say."
            ) from None
        port = None if match["port"] is None else int(match["port"])
        return cls(_canonical(match["name"]), port, network)

    def allows(self, url: httpx.URL) -> bool:
        """Return whether the URL has the name and the port of the entry."""
        port = PORTS[url.scheme] if self.port is None else self.port
        return self.name == _canonical(url.host) and port == _port(url)

    def leads_to(self, address: Address) -> bool:
        """Return whether the name may resolve to this address."""
        if self.network is not None:
            return address in self.network
        return str(address) == self.name or is_public(address)


def is_public(address: Address) -> bool:
    """Return whether an address is public: not private, local, shared, reserved, multicast or embedding another."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in EMBEDDING):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class FetchBudget:
    """The bytes that the images of one request may have together, as many as if they were in its body."""

    def __init__(self, limits: Limits):
        self._limit = self._left = limits.max_body_bytes

    def spend(self, count: int) -> None:
        """Count bytes that have come; raise MediaError where they are too many."""
        self._left -= count
        if self._left < 0:
            raise MediaError(f"the images at the request's URLs are over {self._limit} bytes: send fewer at a time")


class Fetcher:
    """Fetches images in the event loop.

    Args:
        allowed_hosts: entries as above; with none, nothing is fetched.
    """

    def __init__(self, allowed_hosts: Sequence[str], limits: Limits):
        self.allowed = [AllowedHost.parse(entry) for entry in allowed_hosts]
        self.limits = limits
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def remote(self, url: str) -> RemoteImage:
        """Return the image at `url`, checked without the network; raises MediaError."""
        self._host(_parse(url))
        return RemoteImage(url)

    async def image(self, remote: RemoteImage, budget: FetchBudget | None = None) -> dict[str, bytes]:
        """Return the image's file as `{"bytes"}`, with its header checked.

        Args:
            budget: of all images of the request.
        """
        try:
            async with self._slots:
                data = await asyncio.wait_for(self._get(_parse(remote), budget), self.limits.fetch_timeout)
        except TimeoutError:
            raise MediaError(f"the image at its URL did not come in {self.limits.fetch_timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise MediaError(f"the image at its URL cannot be fetched ({type(error).__name__})") from error
        self.limits.check_image(*await in_thread(picture_size, data))
        return {"bytes": data}

    def _host(self, url: httpx.URL) -> AllowedHost:
        for host in self.allowed:
            if host.allows(url):
                return host
        raise MediaError("the URL of an image is of a host that is not in allowed_hosts: send a data URI")

    async def _get(self, url: httpx.URL, budget: FetchBudget | None) -> bytes:
        # No proxy of the environment, which would resolve the name again; no cookies and no connection kept, which
        # might lead to another address than the one that was checked. `image` sets the timeout.
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            for _ in range(1 + REDIRECTS):
                client.cookies.clear()
                response = await self._request(client, url, budget)
                if isinstance(response, bytes):
                    return response
                url = response
        raise MediaError(f"the URL of an image redirects more than {REDIRECTS} times")

    async def _request(
        self, client: httpx.AsyncClient, url: httpx.URL, budget: FetchBudget | None
    ) -> bytes | httpx.URL:
        """Return the body, or the URL of a redirect."""
        address = await self._resolve(self._host(url), url)
        request = client.build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers={"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.host},  # the certificate must be the name's
        )
        response = await client.send(request, stream=True)
        try:
            if response.is_redirect:
                return _parse(str(url.join(response.headers["location"])))
            if response.status_code != 200:
                raise MediaError(f"the URL of an image answers with status {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise MediaError("the URL of an image answers with a compressed body")
            return await self._read(response, budget)
        finally:
            await response.aclose()

    async def _resolve(self, host: AllowedHost, url: httpx.URL) -> Address:
        loop = asyncio.get_running_loop()
        records = await loop.getaddrinfo(url.host, _port(url), type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(address[0]) for *_, address in records]
        if not addresses or not all(map(host.leads_to, addresses)):
            raise MediaError("the URL of an image leads to an address that is not allowed")
        return addresses[0]

    async def _read(self, response: httpx.Response, budget: FetchBudget | None) -> bytes:
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if budget is not None:
                budget.spend(len(chunk))
            if len(data) > self.limits.max_image_bytes:
                raise MediaError(f"the image at its URL is over the limit of {self.limits.max_image_bytes} bytes")
        return bytes(data)


async def fetch_images(tree: Any, fetcher: Fetcher, budget: FetchBudget | None = None) -> Any:
    """Return an item with each `RemoteImage` in it fetched, all concurrently; raises MediaError as `image` does."""
    remotes = list(dict.fromkeys(_remotes(tree)))
    tasks = [asyncio.ensure_future(fetcher.image(remote, budget)) for remote in remotes]
    try:
        images = dict(zip(remotes, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
    return _replace(tree, images) if images else tree


def _remotes(tree: Any) -> list[RemoteImage]:
    if isinstance(tree, RemoteImage):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [remote for value in values for remote in _remotes(value)]


def _replace(tree: Any, images: Mapping[RemoteImage, Any]) -> Any:
    if isinstance(tree, RemoteImage):
        return images[tree]
    if isinstance(tree, dict):
        return {name: _replace(value, images) for name, value in tree.items()}
    return [_replace(value, images) for value in tree] if isinstance(tree, list) else tree


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise MediaError("the URL of an image is broken") from error
    if parsed.scheme not in PORTS or not parsed.host:
        raise MediaError("the URL of an image is neither http nor https")
    if parsed.userinfo:
        raise MediaError("the URL of an image has a user in it, which is not sent")
    return parsed


def _port(url: httpx.URL) -> int:
    return PORTS[url.scheme] if url.port is None else url.port


def _canonical(name: str) -> str:
    name = name.lower().strip("[]").rstrip(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
