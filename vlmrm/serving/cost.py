"""The cost of an item before it is computed: its estimated tokens, and the pixels that are decoded for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlmrm.conversation import FRAME_PIXELS
from vlmrm.data.media import image_size, video_pixels
from vlmrm.errors import MediaError
from vlmrm.formats.openai import OPTIONS as VIDEO_OPTIONS

VIDEO_COLUMNS = ("video", "condition_videos")
PATCH_PIXELS = 28 * 28  # of a token of an image


def estimate_tokens(item: Any, max_pixels: int | None = None) -> int:
    """Return the estimated tokens of an item: one for 4 characters, 28 x 28 pixels, or 100 bytes of a video file.

    Args:
        max_pixels: to which the model shrinks larger images.
    """
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


def children(item: Any) -> Iterable[Any]:
    """Return the values that an item, or a part of one, consists of; none for a single value."""
    return item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()


def count_pixels(items: Any, *, once: bool = False) -> int:
    """Return how many pixels are decoded to score items, by the headers of their media.

    Args:
        once: count equal media once, for a reward that decodes them once.
    """
    media = _media(items, once)
    return sum(medium.pixels for medium in (dict.fromkeys(media) if once else media))


@dataclass(frozen=True)
class _MediaFile:
    """An image, a video, or the frames of a video.

    Each frame is decoded with at least `frame_pixels`; `options` are those of the video's part of a message.
    """

    files: tuple[bytes, ...]
    is_list: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    frame_pixels: int = 0

    @property
    def pixels(self) -> int:
        if not self.is_list:
            [file] = self.files
            try:
                return _image_pixels(file)
            except MediaError:
                return video_pixels(file, dict(self.options), max(self.frame_pixels, FRAME_PIXELS[0]))
        return sum(max(_image_pixels(file), self.frame_pixels) for file in self.files)


def _image_pixels(image: bytes) -> int:
    width, height = image_size(image)
    return width * height


@dataclass(frozen=True)
class _ArrayFile:
    npy: bytes

    @property
    def pixels(self) -> int:
        return len(self.npy) // 3


def _media(item: Any, resized: bool) -> Iterator[_MediaFile | _ArrayFile]:
    """Yield the media of an item; with `resized`, videos of its columns are brought to the model's size as well."""
    if isinstance(item, bytes):
        yield _MediaFile((item,))
    elif isinstance(item, dict) and isinstance(item.get("npy"), bytes):
        yield _ArrayFile(item["npy"])
    elif isinstance(item, dict) and item.get("type") == "video":
        yield from _video(item.get("video"), item, True)
    elif isinstance(item, dict):
        for name, value in item.items():
            if name == "video":
                yield from _video(value, {}, resized)
            elif name == "condition_videos" and isinstance(value, list):
                for video in value:
                    yield from _video(video, {}, resized)
            else:
                yield from _media(value, resized)
    else:
        for part in children(item):
            yield from _media(part, resized)


def _video(video: Any, part: Mapping[str, Any], resized: bool) -> Iterator[_MediaFile | _ArrayFile]:
    """Yield one video: a file, a list of image files, or an array."""
    files = video if isinstance(video, list) else [video]
    if not files or not all(isinstance(file, dict) and isinstance(file.get("bytes"), bytes) for file in files):
        yield from _media(video, resized)
        return
    options = {name: part[name] for name in VIDEO_OPTIONS if part.get(name) is not None}
    least = options.get("min_pixels", FRAME_PIXELS[0] if resized else 0)
    pixels = int(max(least, options.get("resized_height", 0) * options.get("resized_width", 0)))
    yield _MediaFile(tuple(file["bytes"] for file in files), isinstance(video, list), tuple(options.items()), pixels)
