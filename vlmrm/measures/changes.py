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
from functools import wraps
from hashlib import blake2b
from itertools import cycle

import numpy as np
from PIL import Image

from vlmrm.conversation import Reference, Video, VideoOptions
from vlmrm.data.media import MIN_SIDE, image_size, open_image, video_frames

GREY = (128, 128, 128)
NOISE_SIDE = 336  # of the longer side: finer noise would average out to grey where images are resized
JPEG_QUALITY = 15
CROPPED = 0.07  # of each side
SMALLER = 0.7  # of each side: half of the pixels

Rewrite = Callable[[str], str]

CODE = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)", re.DOTALL)
BLOCK = re.compile(r"^\s*(?:```|(?:[-*+]|\d+\.|#+|>|\|)\s)", re.MULTILINE)  # a line that is markdown
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# Of each mark of markdown, with what is left of it; bold before italics.
MARKDOWN = {
    r"^([-*_])(?: ?\1){2,} *(?:\n|\Z)": "",
    r"^ {0,3}(?:#{1,6}|>|[-*+]|\d+\.)[ \t]+(?=\S)": "",
    r"(\*\*|__)(?=\S)([^*_\n]+?)(?<=\S)\1": r"\2",
    r"(?<![\w*])([*_])(?=\S)([^*_\n]+?)(?<=\S)\1(?![\w*])": r"\2",
}
PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning

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


def noise(reference: Reference) -> Image.Image:
    """Return a picture of random colours, drawn by the content."""
    image = open_image(reference)
    rng = np.random.default_rng([*blake2b(image.tobytes(), digest_size=8).digest()])
    scale = min(1.0, NOISE_SIDE / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(image.size, Image.Resampling.NEAREST)


def compressed(reference: Reference) -> bytes:
    """Return the picture as a JPEG file of low quality."""
    file = io.BytesIO()
    open_image(reference).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def cropped(reference: Reference) -> Image.Image:
    """Return the picture without its margin, at its old size."""
    image = open_image(reference)
    width, height = image.size
    left, top = width * CROPPED / 2, height * CROPPED / 2
    return image.resize(image.size, Image.Resampling.BICUBIC, box=(left, top, width - left, height - top))


def smaller(reference: Reference) -> Image.Image:
    """Return the picture with half of its pixels, but no side below the least that models take."""
    image = open_image(reference)
    scale = max(SMALLER, MIN_SIDE / min(image.size))
    if scale >= 1:
        return image
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


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


def prose(rewrite: Rewrite) -> Rewrite:
    """Hide pieces of code from a rewrite: a character that the text does not have stands for each."""

    @wraps(rewrite)
    def rewritten(text: str) -> str:
        pieces = CODE.findall(text)
        if not pieces:
            return rewrite(text)
        mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in text)
        before, *between = rewrite(CODE.sub(mark, text)).split(mark)
        return before + "".join(code + prose for code, prose in zip(pieces, between, strict=True))

    return rewritten


def padded(text: str) -> str:
    """Add sentences that say nothing, until the text is twice as long."""
    longer = continuable(text)
    for filler in cycle(FILLERS):
        longer += f" {filler}"
        if len(longer) >= 2 * len(text):
            return longer
    raise AssertionError


def of_length(length: int) -> Rewrite:
    """Return the rewrite that adds such sentences word by word, up to nearly `length` characters."""

    def lengthened(text: str) -> str:
        longer = start = continuable(text)
        for word in cycle(" ".join(FILLERS).split()):
            if len(longer) + 1 + len(word) > length:
                return text if longer == start else longer
            longer += f" {word}"
        raise AssertionError

    return lengthened


def with_markdown(text: str) -> str:
    """Add a heading, and set the first sentence in bold."""
    if text.startswith(HEADING):
        return text
    first, *further = SENTENCE_END.split(text.strip(), maxsplit=1)
    plain = "\n" in first or CODE.search(first) or "*" in first
    return HEADING + (text if plain else "\n\n".join([f"**{first}**", *further]))


@prose
def without_markdown(text: str) -> str:
    """Remove headings, bullets, rules, bold and italics, also inside each other."""
    stripped = text
    for pattern, content in MARKDOWN.items():
        stripped = re.sub(pattern, content, stripped, flags=re.MULTILINE)
    return text if stripped == text else without_markdown(stripped)


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
