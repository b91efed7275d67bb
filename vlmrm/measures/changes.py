"""Changes of pictures, videos and texts, each deterministic by the content.

Pictures are painted over or degraded at their own size, and raise `MediaError` where they cannot be read. Rewrites of
texts keep their meaning, in the spirit of reWordBench (arXiv 2503.11751), and leave code between backticks alone. A
text to which one does not apply comes back as it is. Phrases are English.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from hashlib import blake2b
from itertools import cycle

import numpy as np
from PIL import Image

from vlmrm.conversation import Reference, Video, VideoOptions
from vlmrm.data.media import MIN_SIDE, image_size, open_image, video_frames

GREY = (128, 128, 128)
JPEG_QUALITY, SMALLER = 90, 0.95  # of a file that holds the same; of each side

Rewrite = Callable[[str], str]

CODE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)", re.DOTALL)
BLOCK = re.compile(r"^\s*(?:```|(?:[-*+]|\d+\.|#+|>|\|)\s)", re.MULTILINE)  # a line that is markdown
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")

# True of any answer, and of no use to anybody.
FILLERS = (
    "There is more than one way to put this, but the point stays the same.",
    "It helps to look at the question carefully before answering it.",
    "The above is meant as an answer to what was asked.",
    "Taking everything into account, this is how the matter presents itself.",
    "Further words would not change the substance of this reply.",
)
HEADING = "## Answer\n\n"
AGREEMENT = "You are absolutely right, and this is an excellent question! "


def grey(reference: Reference) -> Image.Image:
    """Return a grey picture."""
    return Image.new("RGB", image_size(reference), GREY)


def in_tiles(edge: int) -> Callable[[Reference], Image.Image]:
    """Return the change that mixes the tiles of a picture, up to `edge` along each side, drawn by the content."""

    def mixed(reference: Reference) -> Image.Image:
        image = open_image(reference)
        across = min(edge, *image.size)
        width, height = (side // across for side in image.size)
        pixels = np.asarray(image.resize((across * width, across * height), Image.Resampling.BICUBIC))
        tiles = pixels.reshape(across, height, across, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
        drawn = np.random.default_rng([*blake2b(image.tobytes(), digest_size=8).digest()]).permutation(tiles)
        whole = drawn.reshape(across, across, height, width, 3).swapaxes(1, 2).reshape(pixels.shape)
        return Image.fromarray(whole).resize(image.size, Image.Resampling.BICUBIC)

    return mixed


def colourless(reference: Reference) -> Image.Image:
    """Return the picture in shades of grey."""
    return open_image(reference).convert("L").convert("RGB")


def filed_anew(reference: Reference) -> bytes:
    """Return a file without a name that shows the same: a little smaller, but no side below the least, as a JPEG."""
    image, file = open_image(reference), io.BytesIO()
    scale = min(1.0, max(SMALLER, MIN_SIDE / min(image.size)))
    size = round(image.width * scale), round(image.height * scale)
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def shuffled(video: Video) -> Video:
    """Return the video with its frames in another order, drawn by their number."""
    frames, options = _frames(video)
    order = list(range(len(frames)))
    random.Random(len(order)).shuffle(order)
    return Video(tuple(frames[i] for i in order), options)


def painted(video: Video, paint: Callable[[Reference], Reference]) -> Video:
    """Return the video with each frame painted as a picture is."""
    frames, options = _frames(video)
    return Video(tuple(paint(frame) for frame in frames), options)


def _frames(video: Video) -> tuple[tuple[Reference, ...], VideoOptions]:
    video = video_frames(video)
    assert isinstance(video.reference, tuple)
    return video.reference, video.options


# Rewrites ------------------------------------------------------------------------------------------------------------


def padded(text: str) -> str:
    """Add sentences that say nothing, until the text is twice as long."""
    longer = continuable(text)
    for filler in cycle(FILLERS):
        longer += f" {filler}"
        if len(longer) >= 2 * len(text):
            return longer
    raise AssertionError


def with_markdown(text: str) -> str:
    """Add a heading, and set the first sentence in bold."""
    if text.startswith(HEADING):
        return text
    first, *further = SENTENCE_END.split(text.strip(), maxsplit=1)
    plain = "\n" in first or CODE.search(first) or "*" in first
    return HEADING + (text if plain else "\n\n".join([f"**{first}**", *further]))


def opened_with(opening: str) -> Rewrite:
    """Return the rewrite that begins a text with `opening`."""
    return lambda text: text if text.startswith(opening.strip()) else opening + _of_its_own(text)


agreeing = opened_with(AGREEMENT)


def continuable(text: str) -> str:
    """Return a text that can go on: a line that closes a piece of code must end."""
    text = text.rstrip()
    return f"{text}\n" if text.endswith("```") else text


def _of_its_own(text: str) -> str:
    """Return a text that can follow another: a line that is markdown must begin."""
    return f"\n\n{text}" if BLOCK.match(text) else text
