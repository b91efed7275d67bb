"""Duplicates: rows that repeat others, and images that look alike.

Re-encoded, resized or lightly retouched images are near; crops, mirror images and other colours are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations, islice, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import PIL.Image

from vlmrm.conversation import Comparison, Image, Medium, Messages, Video, media_of
from vlmrm.data.media import media_key, messages_key, open_image
from vlmrm.errors import MediaError

RADIUS = 4  # bits of a perceptual hash that may differ between images that look alike
HASH_SIDE = 8  # waves in each direction: a hash has 64 bits
SHRUNK_SIDE = 32  # pixels of the image that is hashed
DIGITS = 3  # to which waves are rounded: an image of one grey must have none
CANDIDATES = 1 << 22  # pairs of hashes compared at a time
CHUNK = 1000  # rows whose images are opened together

Row = TypeVar("Row")


class Look(NamedTuple):
    """A digest of an image's pixels, and its perceptual hash; None for an image of one grey and for a video."""

    digest: str
    hash: int | None

    def is_near(self, other: Look) -> bool:
        if self.hash is None or other.hash is None:
            return self.digest == other.digest
        return (self.hash ^ other.hash).bit_count() <= RADIUS


class Looks:
    """What media look like, each opened once."""

    def __init__(self):
        self._known: dict[str, Look | MediaError] = {}

    def through(self, rows: Iterable[Row], media: Callable[[Row], Iterable[Medium]]) -> Iterator[Row]:
        """Yield the rows as their media have been looked at."""
        remaining = iter(rows)
        with ThreadPoolExecutor() as pool:  # Pillow decodes and resizes outside the interpreter's lock
            while chunk := list(islice(remaining, CHUNK)):
                new = {key: it for row in chunk for key, it in _keyed(media(row)) if key not in self._known}
                self._known.update(zip(new, pool.map(_look, new.values()), strict=True))
                yield from chunk

    def of(self, medium: Medium, row_id: str) -> Look:
        """Return the look of a medium of a row that was yielded; raises MediaError where it cannot be opened."""
        look = self._known[_key(medium)]
        if isinstance(look, MediaError):
            raise type(look)(look.reason, row_id)
        return look


def images_of(messages: Messages) -> Iterator[Medium]:
    """Yield the images, each frame of a list of frames as one, and the video files."""
    for medium in media_of(messages):
        yield from map(Image, medium.reference) if isinstance(medium.reference, tuple) else [medium]


def _key(medium: Medium) -> str:
    return f"{medium.kind}:{media_key(medium.reference)}"


def _keyed(media: Iterable[Medium]) -> Iterator[tuple[str, Medium]]:
    for medium in media:
        with suppress(MediaError):  # no reference at all: `of` raises it again
            yield _key(medium), medium


def _look(medium: Medium) -> Look | MediaError:
    try:
        if isinstance(medium, Video):
            return Look(media_key(medium.reference), None)
        image = open_image(medium.reference)
    except MediaError as error:
        return error
    return Look(media_key(image), perceptual_hash(image))


class Repeat(NamedTuple):
    """A row with the prompt and answers of an earlier one: the id of that, and whether it has another order."""

    first: str
    contradicts: bool


class Repeats:
    """Finds rows with the prompt and answers of an earlier one."""

    def __init__(self) -> None:
        self.first_rows: dict[str, tuple[str, list[float]]] = {}  # id and order by content

    def find(self, row: Comparison) -> Repeat | None:
        """Return what a row repeats; None for the first of its kind."""
        keys = [messages_key(answer) for answer in row.answers]
        answers = sorted(zip(keys, row.ratings, strict=True))
        order = [float(np.sign(a - b)) for (_, a), (_, b) in combinations(answers, 2)]
        key = "".join([messages_key(row.prompt), *sorted(keys)])
        first, first_order = self.first_rows.setdefault(key, (row.id, order))
        return None if first_order is order else Repeat(first, first_order != order)


def perceptual_hash(image: PIL.Image.Image) -> int | None:
    """Return 64 bits: which of the 8x8 slowest waves of the grey image, at 32x32, are stronger than their median.

    None for an image of one grey, which has no structure to compare.
    """
    from scipy.fft import dctn

    grey = np.asarray(
        image.convert("L").resize((SHRUNK_SIDE, SHRUNK_SIDE), PIL.Image.Resampling.LANCZOS), dtype=np.float64
    )
    waves = dctn(grey, norm="ortho")[:HASH_SIDE, :HASH_SIDE].round(DIGITS)
    if not waves.flat[1:].any():
        return None
    return int.from_bytes(np.packbits(waves > np.median(waves)).tobytes(), "big")


def near_pairs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the (i, j) where left[i] and right[j], uint64, differ in at most `RADIUS` bits: [P, 2], in order.

    The bits are cut into RADIUS + 1 bands. Two such hashes agree in all bits of at least one band, so only hashes that
    do are compared.
    """
    bounds = np.linspace(0, 64, RADIUS + 2).round().astype(np.uint64)
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for low, high in pairwise(bounds):
        left_band, right_band = ((hashes >> low) & np.uint64((1 << int(high - low)) - 1) for hashes in (left, right))
        of_left, of_right = np.argsort(left_band), np.argsort(right_band)
        values, starts = np.unique(left_band[of_left], return_index=True)
        begins, ends = (np.searchsorted(right_band[of_right], values, side=side) for side in ("left", "right"))
        for same, begin, end in zip(np.split(of_left, starts[1:]), begins, ends, strict=False):
            j = of_right[begin:end]
            for i in np.array_split(same, 1 + len(same) * len(j) // CANDIDATES):
                near = np.argwhere(np.bitwise_count(left[i, None] ^ right[j]) <= RADIUS)
                pairs.append(np.stack([i[near[:, 0]], j[near[:, 1]]], axis=1))
    return np.unique(np.concatenate(pairs), axis=0)
