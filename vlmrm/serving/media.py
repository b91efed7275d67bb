"""Images, videos and arrays of requests: resolved to bytes within the limits, counted in pixels, and read.

Only headers are decoded, before a request is accepted; the media themselves are decoded by the workers.
"""

from __future__ import annotations

import copy
import io
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tokenize import TokenError
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import Image

from vlmrm.conversation import Conversation, Message, Part, Reference, Text
from vlmrm.conversation import Image as ImagePart
from vlmrm.data.media import decode_data_uri
from vlmrm.errors import ConfigError, MediaError
from vlmrm.formats.wire import Item
from vlmrm.rewards.samples import MEDIA
from vlmrm.serving.event_loop import picture_size
from vlmrm.serving.fetch import Fetcher, RemoteImage
from vlmrm.serving.settings import Limits
from vlmrm.settings import nearest_file


class MediaResolver:
    """Resolves references to images and videos: data URIs, files below `root` and attachments become bytes.

    An image by URL becomes a `RemoteImage`, which `Gateway.score` fetches.

    Args:
        root: the folder below which `file://` references may lie; None refuses them.
        fetcher: of image URLs; None refuses them.
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

    def conversation(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its media as bytes.

        Raises:
            RowError: naming the medium that is refused.
        """
        return Conversation(
            tuple(Message(message.role, tuple(map(self._part, message.content))) for message in conversation.messages)
        )

    def _part(self, part: Part) -> Part:
        if isinstance(part, Text):
            return part
        resolved = self.image(part.reference) if isinstance(part, ImagePart) else self.video(part.reference)
        return replace(part, reference=resolved)

    def image(self, reference: Reference | None) -> bytes | RemoteImage:
        """Return one image; refuse one that by its header is over the limit of pixels."""
        if isinstance(reference, str) and reference[:8].lower().startswith(("http://", "https://")):
            if self.fetcher is None or not self.fetcher.allowed:
                raise MediaError(
                    "image is a URL, and this service fetches none: send a data URI, or set allowed_hosts"
                )
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
            return read_data_uri(reference, kind)
        if scheme == "file":
            return self._file(unquote(urlparse(reference).path), kind)
        if scheme == "attachment":
            return self._attachment(reference.partition(":")[2], kind)
        if scheme in ("http", "https"):
            raise MediaError(f"{kind} is a URL, which this service does not fetch: send a data URI")
        raise MediaError(f"{kind} is neither a data URI nor a file:// reference: send a data URI")

    def _attachment(self, name: str, kind: str) -> bytes:
        if name not in self.attachments:
            raise MediaError(f"{kind} is the attachment {name[:60]!r}, and the request has no file of that name")
        self._read.add(name)
        return self.attachments[name]

    def _file(self, path: str, kind: str) -> bytes:
        if self.root is None:
            raise MediaError(f"{kind} is a file, and this service reads none: send a data URI, or set media_root")
        try:
            real = os.path.realpath(path if os.path.isabs(path) else self.root / path)
            self._check_inside(real, kind)
            # Not blocking: opening a pipe would wait for its other end.
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise MediaError(f"{kind} is not a regular file")
                # A folder of the path may have become a link between the check and the opening.
                self._check_inside(os.readlink(f"/proc/self/fd/{descriptor}"), kind)
                data = file.read(self.limits.max_body_bytes + 1)
        except OSError as error:
            raise MediaError(f"{kind} is a file that cannot be read ({error.strerror})") from error
        except ValueError as error:  # a zero byte in the path
            raise MediaError(f"{kind} is a file whose path is broken") from error
        if len(data) > self.limits.max_body_bytes:
            raise MediaError(f"{kind} is a file over the limit of {self.limits.max_body_bytes} bytes")
        return data

    def _check_inside(self, real: str, kind: str) -> None:
        assert self.root is not None
        if not Path(real).is_relative_to(self.root):
            raise MediaError(f"{kind} is a file outside media_root")


def read_data_uri(reference: str, kind: str) -> bytes:
    """Return the bytes of a `data:` URI; raise MediaError with `kind` first where it is broken or empty."""
    if not (data := decode_data_uri(reference, kind)):
        raise MediaError(f"{kind} is a data URI without data")
    return data


# Arrays --------------------------------------------------------------------------------------------------------------

HEADER_CHARACTERS = 10_000
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npy(data: bytes) -> np.ndarray:
    """Return the array in a .npy file, writable as torch needs it; raises as `view_npy`."""
    return view_npy(data).copy()


def view_npy(data: bytes) -> np.ndarray:
    """Return a view of the array in a .npy file of numbers from an untrusted sender.

    numpy's own `load` also opens zip files, and allocates whatever size a header claims.
    """
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


def with_arrays(item: Item) -> Item:
    """Return the item with the bytes of .npy files, as arrays travel, read as arrays."""
    columns: Any = {name: _medium(value) if name in MEDIA else value for name, value in item.items()}
    return columns


def _medium(value: Any) -> Any:
    if isinstance(value, dict) and "npy" in value:
        return read_npy(value["npy"])
    return [_medium(part) for part in value] if isinstance(value, list) else value
