"""Images and videos: their identity, and their pixels.

A reference is a path, a `file://` or `data:` URI, encoded bytes, or a PIL image; that of a video may also be a list of
image references, its frames. Nothing is downloaded: results on images that change or vanish cannot be reproduced.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
import math
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from threading import Condition
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes, urlparse

import numpy as np
from cachetools import LRUCache, cached
from PIL import Image, ImageOps, UnidentifiedImageError

from vlmrm.conversation import FRAME_PIXELS, Messages, Part, Text, Video, VideoOptions
from vlmrm.data.arguments import INPUT_KEYS
from vlmrm.errors import MediaError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vlmrm")

Result = TypeVar("Result")

MIN_SIDE = 28  # one merged patch of the Qwen-VL family, to whose multiples processors enlarge smaller sides
STRIP_ROWS = 512  # of an image with transparency, that are put on white at a time
MAX_RATIO = 200  # of the sides, accepted by its image processor
# Pillow reads more formats, some by starting other programs (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".heic")
VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v", ".mpg", ".mpeg")
BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")  # of JPEG, PNG, GIF and WebP; MP4 has `ftyp` in it
# `/9j/` could begin a path, if not one of so many characters.
BASE64 = re.compile(rf"({'|'.join(BASE64_STARTS)}|AAAA..Z0eX)[A-Za-z0-9+/\s]{{50,}}={{0,2}}\s*")
FRAME_COUNT_OPTIONS = ("fps", "nframes", "min_frames")  # may raise the number of decoded frames


def media_key(reference: Any, *, by_content: bool = False) -> str:
    """Return the identity of an image or video without decoding it: equal keys have equal pixels.

    For a file it is its absolute path, otherwise a hash of the bytes; so the same image at two paths counts twice.
    With `by_content` it is that of the file's bytes too, which may change.
    """
    if isinstance(reference, (str, os.PathLike)):
        reference = os.fspath(reference)
        if reference.startswith("data:"):
            return once("key", reference, _content_key)
        if reference.startswith(("http://", "https://")):
            return reference
        if by_content:
            return media_key(encoded_media(reference, "medium"))
        return os.path.abspath(local_path(reference))
    if isinstance(reference, (bytes, bytearray, memoryview, Image.Image)):
        return once("key", reference, _content_key)
    if isinstance(reference, Sequence):
        return f"frames:{_hash(*(media_key(frame, by_content=by_content).encode() + bytes(1) for frame in reference))}"
    raise MediaError(f"{media_name(reference)} is no reference to an image or video: give a path, bytes or a data URI")


def _content_key(content: Any) -> str:
    """Return the key of a picture, of bytes or of a data URI."""
    if isinstance(content, Image.Image):
        try:
            pixels = content.tobytes()
        except (OSError, SyntaxError, ValueError) as error:  # of a file that Pillow reads only now
            raise MediaError(f"{media_name(content)} is broken ({error}): replace it or remove the row") from error
        return f"pixels:{_hash(f'{content.mode}{content.size}'.encode(), pixels)}"
    return f"data:{_hash(content.encode())}" if isinstance(content, str) else f"bytes:{_hash(bytes(content))}"


def messages_key(messages: Messages) -> str:
    """Return a hash that is equal for messages with the same text and media."""

    def key(part: Part) -> tuple[object, ...]:
        if isinstance(part, Text):
            return part.kind, part.text
        return part.kind, media_key(part.reference), getattr(part, "options", None)

    return _hash(repr([(message.role, list(map(key, message.content))) for message in messages]).encode())


def _hash(*pieces: bytes) -> str:
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def open_image(reference: Any) -> Image.Image:
    """Read an image as RGB, upright (EXIF), transparency on white; of an animation the first frame."""
    with _opened(reference) as image:
        name = media_name(reference)
        width, height = image.size
        if max(width, height) > MAX_RATIO * min(width, height):
            raise MediaError(f"{name} is {width}x{height} pixels: the sides may differ {MAX_RATIO}-fold at most")
        _check_pixels(f"{name} is", image.size)
        image.load()
        if image is reference:
            image = ImageOps.exif_transpose(image)
        else:  # in place, as we opened it: a copy of 64 megapixels would waste memory
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image, name)


def image_size(reference: Any) -> tuple[int, int]:
    """Return width and height in pixels as stored, from the header; errors are those of `open_image`."""
    with _opened(reference) as image:
        return image.size


@contextmanager
def _opened(reference: Any) -> Generator[Image.Image]:
    name = media_name(reference)
    try:
        if isinstance(reference, Image.Image):
            yield reference
            return
        with _open_bytes(reference, "image") as source, Image.open(source, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise MediaError(f"{name} is not an image that can be read ({kinds}): replace it or remove the row") from error
    except Image.DecompressionBombError as error:
        raise MediaError(f"{name} is too large to be decoded safely ({error}): shrink it") from error
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises SyntaxError for broken PNG chunks
        raise MediaError(f"{name} is broken ({error}): replace it or remove the row") from error


def _check_pixels(what: str, size: tuple[int, int]) -> None:
    if Image.MAX_IMAGE_PIXELS and math.prod(size) > Image.MAX_IMAGE_PIXELS:
        limit = f"over Pillow's safe limit of {Image.MAX_IMAGE_PIXELS}: shrink it"
        raise MediaError(f"{what} {size[0]}x{size[1]} pixels, {limit}")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit values at 255, which makes nearly all pixels white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise MediaError(f"{name} has {image.mode}-mode pixels without a defined white: save it as 8-bit RGB")
    if image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image with transparency as RGB on white, strip by strip, as whole copies would fill the memory."""
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, STRIP_ROWS):
        box = (0, top, image.width, min(top + STRIP_ROWS, image.height))
        strip = image.crop(box).convert("RGBA")
        rgb.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB"), box)
    return rgb


def open_video(
    video: Video, fps: float | None = None, max_frames: int | None = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Read a video as qwen-vl-utils does.

    A file is sampled at `fps` frames per second, with at most `max_frames`, by default as `INPUT_KEYS` says; the
    video's own `fps`, `min_frames`, `max_frames` or `nframes` take precedence. A list of frames is used in full; its
    `sample_fps` (default 2) is their rate. Frames are resized to qwen-vl-utils' limits for videos.

    The frames are uint8 [T, 3, H, W], T even; the metadata are `fps`, `frames_indices` and `total_num_frames`, as the
    processor's `video_metadata` takes them.
    """
    reference, options = video.reference, video.options.as_dict()
    if isinstance(reference, tuple):
        if not reference:
            raise MediaError("a video is an empty list of frames: remove the row")
        metadata: dict[str, Any] = {}
        frames = _Frames(options, len(reference), media_name(reference))
        for frame in reference:
            frames.add(open_image(frame))
    else:
        if "nframes" not in options:
            most = max_frames or INPUT_KEYS["video_max_frames"]
            options = {"fps": fps or INPUT_KEYS["video_fps"], "max_frames": most, **options}
        frames, metadata = _read_video(reference, options)
    pixels, described = frames.resized()
    return pixels, {**described, **metadata}


def video_frames(video: Video) -> Video:
    """Return a video as the list of its frames, as `open_video` samples and resizes them; such a list as it is."""
    if isinstance(video.reference, tuple):
        return video
    pixels, metadata = open_video(video)
    indices, rate = metadata["frames_indices"], metadata["fps"]
    apart = (indices[-1] - indices[0]) / max(len(indices) - 1, 1)  # frames of the file between two of the list
    height, width = pixels.shape[2:]
    options = VideoOptions(
        # Processors read the one for the time between frames, and the other for their times.
        sample_fps=len(indices) / metadata["total_num_frames"] * rate or None,
        raw_fps=rate / apart if apart and rate else None,
        resized_height=height,
        resized_width=width,
    )
    return Video(tuple(Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in pixels), options)


class _Frames:
    """The frames of a video, resized one by one to the size that qwen-vl-utils computes for all of them.

    Only one frame at a time is in memory at full size. The size of a frame depends on the number of frames, among
    which `total_pixels` is divided, but not on their content.
    """

    def __init__(self, options: Mapping[str, Any], count: int, name: str):
        from qwen_vl_utils.vision_process import FRAME_FACTOR

        self.count, self.name, self._options = count + count % FRAME_FACTOR, name, options
        self._size: tuple[int, int] | None = None
        self._resized: list[torch.Tensor] = []

    def add(self, frame: Image.Image) -> None:
        import torch
        from qwen_vl_utils.vision_process import fetch_image
        from torchvision.transforms.functional import InterpolationMode, resize

        if self._size not in (None, frame.size):
            raise MediaError(f"the frames of {self.name} have different sizes: resize them to one")
        self._size = frame.size
        try:
            image = fetch_image({**self._options, "image": frame}, MIN_SIDE)
            size = self._target(*image.size)
        except (ArithmeticError, AssertionError, ValueError) as error:
            raise MediaError(f"the frames of {self.name} cannot be resized to its options ({error})") from error
        # One channel at a time, as resizing computes in float32, which takes much memory for 64 megapixels.
        channels = (torch.from_numpy(np.array(band))[None] for band in image.split())
        bicubic = InterpolationMode.BICUBIC
        self._resized.append(torch.cat([resize(channel, size, bicubic, antialias=True) for channel in channels]))

    def _target(self, width: int, height: int) -> list[int]:
        """Return the height and width of a resized frame, by the rule of `qwen_vl_utils.fetch_video`."""
        from qwen_vl_utils import vision_process as rule

        if "resized_height" in self._options and "resized_width" in self._options:
            size = self._options["resized_height"], self._options["resized_width"]
            return list(rule.smart_resize(*size, factor=MIN_SIDE))
        token = MIN_SIDE * MIN_SIDE
        least = self._options.get("min_pixels", rule.VIDEO_MIN_TOKEN_NUM * token)
        share = self._options.get("total_pixels", rule.MODEL_SEQ_LEN * token * 0.9) / self.count * rule.FRAME_FACTOR
        most = max(min(rule.VIDEO_MAX_TOKEN_NUM * token, share), int(least * 1.05))
        limit = self._options.get("max_pixels", most)
        if limit > most and not self._resized:
            logger.warning("%s: max_pixels is %d, but a frame may have only %d", self.name, limit, most)
        most = min(most, limit)
        return list(rule.smart_resize(height, width, factor=MIN_SIDE, min_pixels=least, max_pixels=most))

    def resized(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the frames, uint8 [T, 3, H, W], T even by repeating the last, and metadata as of a list of frames."""
        import torch

        frames = [*self._resized, *self._resized[-1:] * (self.count - len(self._resized))]
        sampled = self._options.get("sample_fps", 2.0)
        rate = self._options.get("raw_fps", sampled)
        metadata = {
            "fps": rate,
            "frames_indices": list(range(self.count)),
            "total_num_frames": self.count / sampled * rate,
        }
        return torch.stack(frames), metadata


def _read_video(reference: Any, options: dict[str, Any]) -> tuple[_Frames, dict[str, Any]]:
    """Decode, by PyAV, the frames of a video file that qwen-vl-utils' rule selects."""
    import av
    from qwen_vl_utils.vision_process import calculate_video_frame_range, smart_nframes

    name = media_name(reference)
    with _open_bytes(reference, "video") as source:
        try:
            # Without it, a playlist could open other files or the network.
            with av.open(source, "r", options={"protocol_whitelist": "none"}) as container:
                if not container.streams.video:
                    raise MediaError(f"{name} has no video in it: replace it or remove the row")
                stream = container.streams.video[0]
                _check_pixels(f"{name} has frames of", (stream.codec_context.width, stream.codec_context.height))
                rate = float(stream.average_rate or 0)
                # The number of frames in the header may be wrong; counting packets needs no decoding.
                total = sum(packet.size > 0 for packet in container.demux(stream))
                first, last, count = calculate_video_frame_range(options, total, rate)
                sampled = smart_nframes(options, total_frames=count, video_fps=rate)
                indices = np.linspace(first, last, sampled).round().astype(int).tolist()
                container.seek(0)
                frames, selected = _Frames(options, len(indices), name), {*indices}
                decoded = 0
                for index, frame in enumerate(islice(container.decode(stream), indices[-1] + 1)):
                    if index in selected:
                        frames.add(frame.to_image())
                        decoded += 1
        except (av.error.FFmpegError, OSError, ValueError, ArithmeticError, AssertionError) as error:
            raise MediaError(f"{name} cannot be read as a video ({error}): replace it or remove the row") from error
    if decoded < len(indices):
        raise MediaError(f"{name} is broken: only {decoded} of {len(indices)} frames can be decoded")
    return frames, {"fps": rate, "frames_indices": indices, "total_num_frames": count}


def video_pixels(data: bytes, options: Mapping[str, Any], frame_pixels: int = 0) -> tuple[int, int]:
    """Return bounds of the pixels in memory while a video file is read, and of those decoded, by headers and packets.

    A frame is resized as it is decoded, so at most two are in memory at full size; `frame_pixels` are those of a
    resized one, if the options set them. With any option that sets the number of frames all count, else 2 a second.
    """
    import av

    try:
        with av.open(io.BytesIO(data), "r", options={"protocol_whitelist": "none"}) as container:
            stream = container.streams.video[0]
            frames = packets = sum(packet.size > 0 for packet in container.demux(stream))
            default = not any(options.get(name) for name in FRAME_COUNT_OPTIONS)
            if default and (rate := float(stream.average_rate or 0)) > 2:
                frames = min(frames, math.ceil(2 * frames / rate) + 2)
            size = stream.codec_context.width * stream.codec_context.height
            return min(frames, 2) * size + frames * max(min(size, FRAME_PIXELS[1]), frame_pixels), packets * size
    except (av.error.FFmpegError, OSError, ValueError, IndexError, AssertionError):
        return 0, 0  # decoding it will raise a better error


def encoded_media(reference: Any, kind: str) -> bytes:
    """Return the encoded file of a reference to an `image` or `video` unchanged; a PIL image has none."""
    with _open_bytes(reference, kind) as source:
        return source.read()


def png_of(image: Image.Image) -> bytes:
    """Return the image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)  # several times as fast as the default 6, for larger files
    return file.getvalue()


def local_path(reference: str) -> str:
    """Return the path of a `file://` URI; a path stays as it is."""
    return unquote(urlparse(reference).path) if reference.startswith("file://") else reference


def _open_bytes(reference: Any, kind: str) -> IO[bytes]:
    """Open the encoded file of a reference, readable and seekable."""
    name = media_name(reference)
    if isinstance(reference, os.PathLike):
        reference = os.fspath(reference)
    if isinstance(reference, str) and reference.startswith("data:"):
        reference = decode_data_uri(reference, name)
    if isinstance(reference, (bytes, bytearray, memoryview)):
        if not len(reference):
            raise MediaError(f"{name} has zero bytes: replace it or remove the row")
        return io.BytesIO(reference)
    if not isinstance(reference, str):
        raise MediaError(f"{name} is no reference to an image or video: give a path, bytes or a data URI")
    if reference.startswith(("http://", "https://")):
        raise MediaError(f"{name} is on the network: download the {kind} first and give its path")
    path = local_path(reference)
    try:
        if os.path.getsize(path) == 0:
            raise MediaError(f"{name} has zero bytes: replace it or remove the row")
        return Path(path).open("rb")
    except FileNotFoundError:
        raise MediaError(f"{name} does not exist: check the path, or name its folder as image_root") from None
    except OSError as error:
        raise MediaError(f"{name} cannot be opened ({error.strerror or error}): check the path") from error


def decode_data_uri(uri: str, name: str) -> bytes:
    """Return the bytes of a `data:` URI; raise MediaError, which begins with `name`, where it is broken."""
    header, comma, body = uri.partition(",")
    if not comma:
        raise MediaError(f"{name} has no comma after its type: it was cut off")
    if not header.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} is not valid base64 ({error})") from error


def media_name(reference: Any) -> str:
    """Return a short name of the reference for messages, without its content."""
    if isinstance(reference, os.PathLike):
        return os.fspath(reference)
    if isinstance(reference, str):
        return f"the data URI {reference[:40]}..." if reference.startswith("data:") else reference
    if isinstance(reference, (bytes, bytearray, memoryview)):
        return f"the embedded file of {len(reference)} bytes"
    if isinstance(reference, Image.Image):
        return f"the {reference.mode} image in memory"
    if isinstance(reference, Sequence) and reference:
        return f"the {len(reference)} frames from {media_name(reference[0])}"
    return f"{type(reference).__name__} {reference!r:.40}"


@dataclass(frozen=True)
class PathRules:
    """Resolves the references of a row for `open_image` and `open_video`; base64 becomes a data URI."""

    folder: str  # from which relative paths start
    root: str | None = None  # paths outside of it are errors
    rewrites: tuple[tuple[str, str], ...] = ()  # old and new prefixes, of which the first match is applied

    def __call__(self, reference: Any) -> Any:
        if isinstance(reference, (str, os.PathLike)):
            return self._resolve(os.fspath(reference))
        if isinstance(reference, tuple):
            return tuple(map(self, reference))
        return reference

    def _resolve(self, path: str) -> str:
        if path.startswith("data:"):
            return path
        if BASE64.fullmatch(path):
            kind = "video/mp4" if path.startswith("AAAA") else "image/png"
            return f"data:{kind};base64,{''.join(path.split())}"
        for old, new in self.rewrites:
            if path.startswith(old):
                path = new + path[len(old) :]
                break
        if path.startswith(("http://", "https://")):
            return path
        path = os.path.normpath(os.path.join(self.folder, local_path(path)))
        if self.root is not None and not Path(path).resolve().is_relative_to(Path(self.root).resolve()):
            raise MediaError(f"{path} is outside image_root {self.root}: move it or change image_root")
        return path


# Once a round --------------------------------------------------------------------------------------------------------

KEPT_BYTES = 512 * 2**20  # of a round; what was not asked for for longest is dropped


class RoundMedia:
    """What was made of the pictures, videos and bytes of a round, by identity: none of them may change meanwhile."""

    def __init__(self) -> None:
        cache = LRUCache(KEPT_BYTES, getsizeof=lambda entry: 1 + _bytes_of(entry[1]))

        @cached(cache, key=lambda name, source, make: name, condition=Condition())
        def made(name: Any, source: Any, make: Callable[[Any], Any]) -> tuple[Any, Any]:
            return source, make(source)  # kept beside its result, a source keeps its id

        self.made = made


@contextmanager
def media_round(media: RoundMedia | None = None) -> Generator[None]:
    """Let `once` remember within the block, on this thread: in `media`, else with the block around it, else anew."""
    if media is None and _current.get() is not None:
        yield
        return
    token = _current.set(media or RoundMedia())
    try:
        yield
    finally:
        _current.reset(token)


def once(kind: str, source: Any, make: Callable[[Any], Result]) -> Result:
    """Return `make(source)`, made once within a `media_round` for each kind and source; outside of one, each time."""
    if (media := _current.get()) is None:
        return make(source)
    return media.made((kind, source if isinstance(source, str) else id(source)), source, make)[1]


_current: ContextVar[RoundMedia | None] = ContextVar("media_of_round", default=None)


def _bytes_of(result: Any) -> int:
    if isinstance(result, Image.Image):
        return result.width * result.height * len(result.getbands())
    if isinstance(result, (list, tuple)):
        return sum(map(_bytes_of, result))
    return int(getattr(result, "nbytes", 0)) or (len(result) if isinstance(result, (str, bytes)) else 0)
