"""Images by URL: from allowed hosts alone, from the address that was checked, and nothing but images."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from tests.serving.sent_media import png
from tests.serving.services import fake, in_loop, running
from vlmrm.errors import MediaError
from vlmrm.serving.media import Fetcher, is_public
from vlmrm.serving.settings import Limits


class Pictures(BaseHTTPRequestHandler):
    """A server of pictures, and of what a picture's URL may turn out to be."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append((self.headers["Host"], self.path))  # ty: ignore
        if self.path == "/moved":
            self.wfile.write(b"HTTP/1.1 302 Found\r\nLocation: /cat.png\r\nContent-Length: 0\r\n\r\n")
            return
        body = {"/text": b"root:x:0:0", "/large": png() + bytes(5000), "/wide": png(400, 300)}.get(self.path, png())
        self.send_response(404 if self.path == "/absent" else 200)
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body) + (self.path == "/slow")))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/slow":
            self.server.finished.wait()  # ty: ignore

    def log_message(self, *args): ...


@contextmanager
def pictures() -> Generator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    server.asked, server.finished = [], Event()  # ty: ignore
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.finished.set()  # ty: ignore
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def server():
    with pictures() as server:
        yield server


def url(server: ThreadingHTTPServer, path: str, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.server_address[1]}{path}"


def fetcher(server: ThreadingHTTPServer, host: str = "127.0.0.1", timeout: float = 600.0, **limits: int) -> Fetcher:
    bounds = Limits(max_image_bytes=4000, max_pixels=10_000, fetch_timeout=timeout, **limits)
    return Fetcher([f"{host}:{server.server_address[1]}"], bounds)


@pytest.fixture(autouse=True)
def names(monkeypatch) -> list[str]:
    """pictures.test is this machine, public.test an address of the internet; every look-up is noted."""
    known = {"pictures.test": "127.0.0.1", "public.test": "93.184.216.34", "mapped.test": "::ffff:127.0.0.1"}
    asked: list[str] = []

    async def getaddrinfo(self, host, port, **_):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(host, host), port))]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


def get(one: Fetcher, where: str) -> bytes:
    async def fetch():
        return await one.image(one.remote(where), {})

    return asyncio.run(fetch())["bytes"]


def test_an_allowed_image_comes_from_its_checked_address(server, names):
    assert get(fetcher(server), url(server, "/cat.png")) == png()
    assert server.asked[-1] == (f"127.0.0.1:{server.server_address[1]}", "/cat.png")
    assert names == ["127.0.0.1"]  # once: a second answer cannot differ


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/moved", "answers with status 302"),
        ("/absent", "answers with status 404"),
        ("/packed", "a compressed body"),
        ("/text", "is not an image"),
        ("/large", "over the limit of 4000 bytes"),
        ("/wide", "400x300 pixels, over the limit of 10000"),
    ],
)
def test_what_is_no_allowed_image_is_refused(server, path, reason):
    with pytest.raises(MediaError, match=reason):
        get(fetcher(server), url(server, path))


def test_an_image_that_never_ends_is_given_up():
    with pictures() as server, pytest.raises(MediaError, match=r"did not come in 0\.2 s"):
        get(fetcher(server, timeout=0.2), url(server, "/slow"))


@pytest.mark.parametrize("name", ["pictures.test", "mapped.test", "localhost"])
def test_a_name_never_leads_into_a_private_network(server, name):
    with pytest.raises(MediaError, match=r"leads to an address that is not allowed|cannot be fetched"):
        get(fetcher(server, name), url(server, "/", name))


@pytest.mark.parametrize(
    "where",
    [
        "http://other.test/", "https://pictures.test/", "http://pictures.test/", "http://pictures.test@evil.test/",
        "http://user:word@pictures.test/", "http://[::1]/", "http://2130706433/", "http://pictures.test\\@x/",
    ],
)  # fmt: skip
def test_other_hosts_ports_and_spellings_are_never_contacted(server, names, where):
    with pytest.raises(MediaError):
        fetcher(server, "pictures.test").remote(where)
    assert names == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "192.0.2.1", "::1",
        "fe80::1", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet(address):
    assert not is_public(ipaddress.ip_address(address))
    assert all(map(is_public, map(ipaddress.ip_address, ("8.8.8.8", "2606:4700::6810:84e5", "::ffff:8.8.8.8"))))


def test_each_image_of_an_item_is_fetched_once(server):
    one = fetcher(server)
    cat, dog = one.remote(url(server, "/cat.png")), one.remote(url(server, "/dog.png"))
    before = len(server.asked)
    item = {"image": cat, "video": [cat, dog], "metadata": {"url": "http://evil.test"}}
    [whole] = asyncio.run(one.fetch([item]))
    assert whole == {
        "image": {"bytes": png()},
        "video": [{"bytes": png()}] * 2,
        "metadata": {"url": "http://evil.test"},
    }
    assert len(server.asked) == before + 2


def test_images_by_url_share_the_body_limit(server):
    one = fetcher(server, max_body_bytes=2 * len(png()) + 1)
    images = [{"image": one.remote(url(server, f"/{name}.png"))} for name in ("cat", "dog", "cow")]
    assert all(isinstance(it, dict) for it in asyncio.run(one.fetch(images[:2])))
    [refused] = [it for it in asyncio.run(one.fetch(images)) if isinstance(it, MediaError)]
    assert "request's URLs are over" in str(refused)


@in_loop
async def test_a_failing_url_costs_no_other_item(server):
    host = f"127.0.0.1:{server.server_address[1]}"
    async with running(fake(), allowed_hosts=[host]) as (_, client):
        items = [{"prompt": "aaa", "image": url(server, path)} for path in ("/cat.png", "/text")]
        items.append({"prompt": "b", "image": "http://169.254.169.254/latest/meta-data"})
        data = (await client.post("/v1/rewards", json={"items": items})).json()["data"]
    assert [one["score"] for one in data] == [3, None, None]
    assert "is not an image" in data[1]["error"] and "not in allowed_hosts" in data[2]["error"]
