"""Images, videos and arrays of requests: resolved to bytes within the limits, read, counted in pixels and tokens."""

from __future__ import annotations

import asyncio
import copy
import io
import ipaddress
import itertools
import math
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tokenize import TokenError
from typing import Any
from urllib.parse import unquote, urlparse

import httpx2 as httpx
import numpy as np
from PIL import Image

from vlmrm.conversation import FRAME_PIXELS, Conversation, Message, Part, Reference, Sample, Text
from vlmrm.conversation import Image as ImagePart
from vlmrm.data.media import decode_data_uri, video_pixels
from vlmrm.errors import ConfigError, MediaError, RowError, or_error
from vlmrm.formats.flow_factory import PromptTemplate, sample_to_conversation
from vlmrm.formats.openai import OPTIONS as VIDEO_OPTIONS
from vlmrm.formats.wire import Item, read_item, write_item
from vlmrm.rewards.samples import MEDIA, as_pil
from vlmrm.serving.clients import picture_size
from vlmrm.serving.settings import Limits
from vlmrm.serving.worker.channel import pack
from vlmrm.settings import nearest_file


class MediaResolver:
    """Resolves references to images and videos: data URIs, files below `root` and attachments become bytes.

    An image by URL becomes a `RemoteImage`, which `Gateway.written` fetches.
    """

    def __init__(self, limits: Limits, root: Path | None, fetcher: Fetcher | None = None):
        if root is not None and not root.is_dir():
            raise ConfigError(f"media_root is {root}, which is no folder{nearest_file(root, ': check the path.')}")
        self.limits, self.fetcher = limits, fetcher
        self.root = None if root is None else root.resolve()
        self.attachments: Mapping[str, bytes] = {}
        self._read: set[str] = set()  # of the attachments
        # Pillow then refuses larger images itself before it decodes them; workers have a limit of their own.
        Image.MAX_IMAGE_PIXELS = limits.max_pixels

    def with_attachments(self, attachments: Mapping[str, bytes]) -> MediaResolver:
        """Return a copy for one request: `attachment:NAME` refers to its files."""
        resolver = copy.copy(self)
        resolver.attachments, resolver._read = attachments, set()
        return resolver

    def unread(self) -> list[str]:
        """Return the names of the attachments that nothing has referred to so far."""
        return [name for name in self.attachments if name not in self._read]

    def item(self, content: Conversation | Sample, group: str | int | None = None) -> Item:
        """Return the item of a conversation or sample, with media as bytes; raises RowError naming what is refused."""
        if isinstance(content, Conversation):
            messages = (Message(it.role, tuple(map(self._part, it.content))) for it in content.messages)
            return write_item(Conversation(tuple(messages)), group)
        resolved = replace(
            content,
            image=None if content.image is None else self.image(content.image),
            video=None if content.video is None else self.video(content.video),
            condition_images=tuple(map(self.image, content.condition_images)),
            condition_videos=tuple(map(self.video, content.condition_videos)),
        )
        return write_item(resolved, group)

    def _part(self, part: Part) -> Part:
        if isinstance(part, Text):
            return part
        resolved = self.image(part.reference) if isinstance(part, ImagePart) else self.video(part.reference)
        return replace(part, reference=resolved)

    def image(self, reference: Reference | None) -> bytes | RemoteImage:
        """Return one image; refuse one that by its header is over the limit of pixels."""
        if isinstance(reference, str) and reference[:8].lower().startswith(("http://", "https://")):
            if self.fetcher is None or not self.fetcher.allowed:
                raise MediaError("image is a URL, and this service fetches none: send a data URI or set allowed_hosts")
            return self.fetcher.remote(reference)
        data = self._bytes(reference, "image")
        if len(data) > self.limits.max_image_bytes:
            raise MediaError(f"an image has {len(data)} bytes, over the limit of {self.limits.max_image_bytes}")
        self.limits.check_image(*picture_size(data))
        return data

    def video(self, reference: Any) -> bytes | tuple[bytes | RemoteImage, ...]:
        """Return a video file, or the images of a list of frames."""
        if not isinstance(reference, (list, tuple)):
            return self._bytes(reference, "video")
        if len(reference) > self.limits.max_frames:
            raise MediaError(f"a video has {len(reference)} frames, over the limit of {self.limits.max_frames}")
        return tuple(map(self.image, reference))

    def _bytes(self, reference: Any, kind: str) -> bytes:
        if isinstance(reference, bytes):
            return reference
        if not isinstance(reference, str):
            raise MediaError(f"{kind} is neither a data URI nor a reference to a file: send a data URI")
        scheme = reference.partition(":")[0].lower()
        if scheme == "data":
            if not (data := decode_data_uri(reference, kind)):
                raise MediaError(f"{kind} is a data URI without data")
            return data
        if scheme == "file":
            return self._file(unquote(urlparse(reference).path), kind)
        if scheme == "attachment":
            name = reference.partition(":")[2]
            if name not in self.attachments:
                raise MediaError(f"{kind} is the attachment {name[:60]!r}, and the request has no file of that name")
            self._read.add(name)
            return self.attachments[name]
        if scheme in ("http", "https"):
            raise MediaError(f"{kind} is a URL, which this service does not fetch: send a data URI")
        raise MediaError(f"{kind} is neither a data URI nor a file:// reference: send a data URI")

    def _file(self, path: str, kind: str) -> bytes:
        if self.root is None:
            raise MediaError(f"{kind} is a file, and this service reads none: send a data URI, or set media_root")
        try:
            real = os.path.realpath(path if os.path.isabs(path) else self.root / path)
            if not Path(real).is_relative_to(self.root):
                raise MediaError(f"{kind} is a file outside media_root")
            # Not blocking: opening a pipe would wait for its other end.
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise MediaError(f"{kind} is not a regular file")
                # A folder of the path may have become a link between the check and the opening.
                if not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self.root):
                    raise MediaError(f"{kind} is a file outside media_root")
                data = file.read(self.limits.max_body_bytes + 1)
        except OSError as error:
            raise MediaError(f"{kind} is a file that cannot be read ({error.strerror})") from error
        except ValueError as error:  # a zero byte in the path
            raise MediaError(f"{kind} is a file whose path is broken") from error
        if len(data) > self.limits.max_body_bytes:
            raise MediaError(f"{kind} is a file over the limit of {self.limits.max_body_bytes} bytes")
        return data


# Arrays --------------------------------------------------------------------------------------------------------------

HEADER_CHARACTERS = 10_000
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npy(data: bytes) -> np.ndarray:
    """Return the array in a .npy file, writable as torch needs it; raises as `view_npy`."""
    return view_npy(data).copy()


def view_npy(data: bytes) -> np.ndarray:
    """Return a view of the array in a .npy file; numpy's own `load` allocates whatever size a header claims."""
    file = io.BytesIO(data)
    try:
        read_header = READERS[np.lib.format.read_magic(file)]
        shape, by_columns, kind = read_header(file, max_header_size=HEADER_CHARACTERS)
        if any(type(side) is not int for side in shape):  # numpy takes True for 1
            raise ValueError(f"a shape of {shape}")
    except (KeyError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError, TokenError) as error:
        raise MediaError("an array is not a .npy file of version 1 or 2: save it by numpy.save") from error
    if kind.kind not in "biuf" or min(shape, default=0) < 0:
        raise MediaError(f"an array holds {kind}: save numbers")
    size, actual = math.prod(shape) * kind.itemsize, len(data) - file.tell()
    if size != actual:
        raise MediaError(f"an array of shape {list(shape)} takes {size} bytes, but its file has {actual}")
    flat = np.frombuffer(data, kind, offset=file.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")


def write_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array))
    return file.getvalue()


def with_arrays(item: Item) -> Item:
    """Return the item with the bytes of .npy files, as arrays travel, read as arrays."""
    columns: Any = {name: _medium(value) if name in MEDIA else value for name, value in item.items()}
    return columns


def conversation_of(item: Item, template: PromptTemplate) -> Conversation:
    """Return the conversation that an item is, or becomes by the template."""
    columns: Any = {name: as_pil(name, value) for name, value in with_arrays(item).items()}  # they hold no arrays
    content = read_item(columns)
    if isinstance(content, Conversation):
        return content
    return sample_to_conversation(content, template, placeholders=False)


def _medium(value: Any) -> Any:
    if isinstance(value, dict) and "npy" in value:
        return read_npy(value["npy"])
    return [_medium(part) for part in value] if isinstance(value, list) else value


# Their cost ----------------------------------------------------------------------------------------------------------

PATCH_PIXELS = 28 * 28  # of a token of an image
DECODED_PIXELS = 2**15  # which take about as long as a token
SLOW_PIXELS = 2**24  # which take about a third of a second


def estimate_tokens(item: Any, max_pixels: int | None = None) -> int:
    """Return the estimated tokens of an item: one for 4 characters, 28 x 28 pixels, 100 bytes of video."""
    if isinstance(item, dict) and isinstance(item.get("npy"), bytes):
        return len(item["npy"]) // (3 * PATCH_PIXELS) + 1
    if isinstance(item, str):
        return len(item) // 4 + 1
    if isinstance(item, bytes):
        try:
            pixels = _image_pixels(item)
        except MediaError:  # a video
            return len(item) // 100 + 1
        return min(pixels, max_pixels or pixels) // PATCH_PIXELS + 1
    return sum(estimate_tokens(part, max_pixels) for part in children(item))


def count_prefixes(items: Sequence[Item], max_pixels: int | None = None) -> tuple[int, dict[str, int]]:
    """Estimate the tokens of items, each prompt counted once, and those of each prompt by its content's digest."""
    cost, prefixes = 0, {}
    for item in items:
        prompt, answer = _parts(item)
        prefixes[sha256(pack(prompt)).hexdigest()] = estimate_tokens(prompt, max_pixels)
        cost += estimate_tokens(answer, max_pixels)
    return cost + sum(prefixes.values()), prefixes


def _parts(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what of an item a model reads before the answer, and the answer."""
    messages = item.get("messages")
    if isinstance(messages, list):
        return messages[:-1], messages[-1:]
    # As in `sample_to_conversation`: without a response, the image or the video is the answer.
    answers = ("response",) if item.get("response") is not None else ("image", "video")
    prompt = {name: value for name, value in item.items() if name not in (*answers, "group")}
    return prompt, [item.get(name) for name in answers]


def children(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()


def count_text(item: Any) -> int:
    """Return the characters of all texts of items."""
    return len(item) if isinstance(item, str) else sum(map(count_text, children(item)))


def count_pixels(items: Any, *, once: bool = False) -> tuple[int, int]:
    """Return how many pixels items have in memory, and how many are decoded, by headers; equal media count `once`."""
    media = _media(items, once)
    counts = [*itertools.starmap(_pixels, dict.fromkeys(media) if once else media)]
    return sum(held for held, _ in counts), sum(decoded for _, decoded in counts)


# Of a medium: its content, the options of its part of a message, and the least pixels with which a frame is decoded.
Medium = tuple[str, Any, tuple[tuple[str, Any], ...], int]


def _pixels(kind: str, content: Any, options: tuple[tuple[str, Any], ...], least: int) -> tuple[int, int]:
    if kind == "array":
        return len(content) // 3, 0
    if kind == "latents":
        try:
            pixels = math.prod(decoded_size(view_npy(content).shape))
        except (MediaError, ValueError):  # the decoder refuses it by name
            pixels = len(content)
    elif kind == "frames":
        pixels = sum(max(_image_pixels(file), least) for file in content)
    else:
        try:
            pixels = _image_pixels(content)
        except MediaError:
            return video_pixels(content, dict(options), max(least, FRAME_PIXELS[0]))
    return pixels, pixels


def _image_pixels(image: bytes) -> int:
    return math.prod(picture_size(image))


def decoded_size(latents: Sequence[int]) -> tuple[int, int, int]:
    """Return frames, height and width of latents [C, T, H, W] decoded by Wan 2.1, or, with 48 channels, Wan 2.2."""
    channels, times, height, width = latents
    scale = 16 if channels == 48 else 8
    return 4 * (times - 1) + 1, scale * height, scale * width


def _media(item: Any, resized: bool, name: str = "") -> Iterator[Medium]:
    """Yield the media of an item; with `resized`, videos of its columns are brought to the model's size as well."""
    if isinstance(item, bytes):
        yield "file", item, (), 0
    elif name == "video":
        yield from _video(item, {}, resized)
    elif isinstance(item, dict) and isinstance(item.get("npy"), bytes):
        yield "latents" if name == "latents" else "array", item["npy"], (), 0
    elif isinstance(item, dict) and item.get("type") == "video":
        yield from _video(item.get("video"), item, True)
    elif isinstance(item, dict):
        for name, value in item.items():
            yield from _media(value, resized, name)
    else:
        for part in children(item):
            yield from _media(part, resized, "video" if name == "condition_videos" else "")


def _video(video: Any, part: Mapping[str, Any], resized: bool) -> Iterator[Medium]:
    files = video if isinstance(video, list) else [video]
    if not files or not all(isinstance(file, dict) and isinstance(file.get("bytes"), bytes) for file in files):
        yield from _media(video, resized)
        return
    options = {name: part[name] for name in VIDEO_OPTIONS if part.get(name) is not None}
    least = options.get("min_pixels", FRAME_PIXELS[0] if resized else 0)
    pixels = int(max(least, options.get("resized_height", 0) * options.get("resized_width", 0)))
    kind, content = ("frames", tuple(it["bytes"] for it in files)) if video is files else ("file", video["bytes"])
    yield kind, content, tuple(options.items()), pixels


# By URL --------------------------------------------------------------------------------------------------------------

# `allowed_hosts` holds `NAME[:PORT]`. A name may only lead to public addresses; a host of a private network is allowed
# by its address. A name is resolved once and the connection goes to that very address, so that nothing can change
# between the check and the use. No redirect is followed.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

CONCURRENCY = 16  # images that are fetched at the same time
PORTS = {"http": 80, "https": 443}
ENTRY = re.compile(r"([A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
# They embed IPv4 addresses, which need not be public even where these are.
EMBEDDING = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")))


class RemoteImage(str):
    """The URL of an image that is still to be fetched. No text of a request can be of this type."""


def is_public(address: Address) -> bool:
    """Return whether an address is public: not private, local, shared, reserved, multicast or embedding another."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in EMBEDDING):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class Fetcher:
    """Fetches images of `allowed_hosts`, entries as above; with none, nothing is fetched."""

    def __init__(self, allowed_hosts: Sequence[str], limits: Limits):
        self.allowed: set[tuple[str, int | None]] = set()
        for entry in allowed_hosts:
            if (match := ENTRY.fullmatch(entry)) is None:
                raise ConfigError(f"allowed_hosts: {entry!r} is not NAME[:PORT]: write images.org, say.")
            self.allowed.add((_canonical(match[1]), int(match[2]) if match[2] else None))
        self.limits = limits
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def remote(self, url: str) -> RemoteImage:
        """Return the image at `url`, checked without the network; raises MediaError."""
        self._parse(url)
        return RemoteImage(url)

    async def fetch(self, items: Sequence[Item | RowError]) -> list[Item | RowError]:
        """Return items with each `RemoteImage` fetched once; one that lacks an image becomes its error."""
        remotes = list(dict.fromkeys(_remotes(items)))
        sizes: dict[str, int] = {}
        files = await asyncio.gather(*(self.image(one, sizes) for one in remotes), return_exceptions=True)
        images = dict(zip(remotes, files, strict=True))
        return [or_error(_replace, item, images) for item in items]

    async def image(self, remote: RemoteImage, sizes: dict[str, int]) -> dict[str, bytes]:
        """Return the image's file as `{"bytes"}`, its header checked; `sizes` are those of the request's images."""
        try:
            async with self._slots:
                data = await asyncio.wait_for(self._get(remote, sizes), self.limits.fetch_timeout)
        except TimeoutError:
            raise MediaError(f"the image at its URL did not come in {self.limits.fetch_timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise MediaError(f"the image at its URL cannot be fetched ({type(error).__name__})") from error
        self.limits.check_image(*picture_size(data))
        return {"bytes": data}

    def _parse(self, url: str) -> httpx.URL:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise MediaError("the URL of an image is broken") from error
        if parsed.scheme not in PORTS or not parsed.host:
            raise MediaError("the URL of an image is neither http nor https")
        if parsed.userinfo:
            raise MediaError("the URL of an image has a user in it, which is not sent")
        name, plain = _canonical(parsed.host), _port(parsed) == PORTS[parsed.scheme]
        if (name, _port(parsed)) not in self.allowed and not (plain and (name, None) in self.allowed):
            raise MediaError("the URL of an image is of a host that is not in allowed_hosts: send a data URI")
        return parsed

    async def _get(self, remote: RemoteImage, sizes: dict[str, int]) -> bytes:
        url = self._parse(remote)
        records = await asyncio.get_running_loop().getaddrinfo(url.host, _port(url), type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(address[0]) for *_, address in records]
        if not addresses or not all(str(it) == _canonical(url.host) or is_public(it) for it in addresses):
            raise MediaError("the URL of an image leads to an address that is not allowed")
        # No proxy of the environment, which would resolve the name again, and no connection that is kept, which might
        # lead to another address than the one that was checked. `image` sets the timeout.
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            request = client.build_request(
                "GET",
                url.copy_with(host=str(addresses[0])),
                headers={"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
                extensions={"sni_hostname": url.host},  # the certificate must be the name's
            )
            response = await client.send(request, stream=True)
            if response.status_code != 200:
                raise MediaError(f"the URL of an image answers with status {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise MediaError("the URL of an image answers with a compressed body")
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                sizes[remote] = len(data)
                if len(data) > self.limits.max_image_bytes:
                    raise MediaError(f"the image at its URL is over the limit of {self.limits.max_image_bytes} bytes")
                if sum(sizes.values()) > (most := self.limits.max_body_bytes):
                    raise MediaError(f"the images at the request's URLs are over {most} bytes: send fewer at a time")
        return bytes(data)


def _remotes(tree: Any) -> list[RemoteImage]:
    if isinstance(tree, RemoteImage):
        return [tree]
    return [remote for value in children(tree) for remote in _remotes(value)]


def _replace(tree: Any, images: Mapping[RemoteImage, Any]) -> Any:
    if isinstance(tree, RemoteImage):
        if isinstance(images[tree], BaseException):
            raise images[tree]
        return images[tree]
    if isinstance(tree, dict):
        return {name: _replace(value, images) for name, value in tree.items()}
    return [_replace(value, images) for value in tree] if isinstance(tree, list) else tree


def _port(url: httpx.URL) -> int:
    return PORTS[url.scheme] if url.port is None else url.port


def _canonical(name: str) -> str:
    name = name.lower().strip("[]").rstrip(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
