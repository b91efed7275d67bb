"""The cost of an item before it is computed: its estimated tokens, and the pixels that are decoded for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from vlmrm.conversation import FRAME_PIXELS
from vlmrm.data.media import video_pixels
from vlmrm.errors import MediaError
from vlmrm.formats.openai import OPTIONS as VIDEO_OPTIONS
from vlmrm.formats.wire import Item
from vlmrm.serving.event_loop import picture_size
from vlmrm.serving.media import view_npy

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


def count_prefixes(items: Sequence[Item], max_pixels: int | None = None) -> tuple[int, dict[str, int]]:
    """Estimate the tokens of items, each prompt counted once, and those of each prompt by its digest.

    Equal prompts have equal digests in all requests: media count by their content, and the order of keys not at all.
    """
    cost, prefixes = 0, {}
    for item in items:
        prompt, answer = _parts(item)
        digest = sha256()
        _feed(digest, prompt)
        prefixes[digest.hexdigest()] = estimate_tokens(prompt, max_pixels)
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


def _feed(digest: Any, part: Any) -> None:
    """Add a tree to a digest such that different trees add different bytes."""
    if isinstance(part, dict):
        part = [value for pair in sorted(part.items()) for value in pair]
        digest.update(b"d")
    if isinstance(part, (list, tuple)):
        digest.update(b"l%d:" % len(part))
        for value in part:
            _feed(digest, value)
    else:
        content = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        digest.update(b"%c%d:" % (b"b" if isinstance(part, bytes) else b"t", len(content)))
        digest.update(content)


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
    width, height = picture_size(image)
    return width * height


@dataclass(frozen=True)
class _ArrayFile:
    npy: bytes

    @property
    def pixels(self) -> int:
        return len(self.npy) // 3


@dataclass(frozen=True)
class _Latents:
    """Latents of a video, [C, T, H, W]; they are decoded to frames before the reward sees them."""

    npy: bytes

    @property
    def pixels(self) -> int:
        try:
            return math.prod(decoded_size(view_npy(self.npy).shape))
        except (MediaError, ValueError):  # the decoder refuses it by name
            return len(self.npy)


def decoded_size(latents: Sequence[int]) -> tuple[int, int, int]:
    """Return frames, height and width of latents [C, T, H, W] decoded by Wan 2.1, or, with 48 channels, Wan 2.2."""
    channels, times, height, width = latents
    scale = 16 if channels == 48 else 8
    return 4 * (times - 1) + 1, scale * height, scale * width


def _media(item: Any, resized: bool) -> Iterator[_MediaFile | _ArrayFile | _Latents]:
    """Yield the media of an item; with `resized`, videos of its columns are brought to the model's size as well."""
    if isinstance(item, bytes):
        yield _MediaFile((item,))
    elif isinstance(item, dict) and isinstance(item.get("npy"), bytes):
        yield _ArrayFile(item["npy"])
    elif isinstance(item, dict) and item.get("type") == "video":
        yield from _video(item.get("video"), item, True)
    elif isinstance(item, dict):
        for name, value in item.items():
            if name == "latents" and isinstance(value, dict) and isinstance(value.get("npy"), bytes):
                yield _Latents(value["npy"])
            elif name == "video":
                yield from _video(value, {}, resized)
            elif name == "condition_videos" and isinstance(value, list):
                for video in value:
                    yield from _video(video, {}, resized)
            else:
                yield from _media(value, resized)
    else:
        for part in children(item):
            yield from _media(part, resized)


def _video(video: Any, part: Mapping[str, Any], resized: bool) -> Iterator[_MediaFile | _ArrayFile | _Latents]:
    """Yield one video: a file, a list of image files, or an array."""
    files = video if isinstance(video, list) else [video]
    if not files or not all(isinstance(file, dict) and isinstance(file.get("bytes"), bytes) for file in files):
        yield from _media(video, resized)
        return
    options = {name: part[name] for name in VIDEO_OPTIONS if part.get(name) is not None}
    least = options.get("min_pixels", FRAME_PIXELS[0] if resized else 0)
    pixels = int(max(least, options.get("resized_height", 0) * options.get("resized_width", 0)))
    yield _MediaFile(tuple(file["bytes"] for file in files), isinstance(video, list), tuple(options.items()), pixels)
