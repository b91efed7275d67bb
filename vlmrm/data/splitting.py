"""`vlmrm split`: a training and a held-out part by prompt; rows with images that look alike are on one side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vlmrm.conversation import Comparison, Image, Medium, media_of
from vlmrm.data.comparisons import is_held_out_key, split_key
from vlmrm.data.lookalikes import near_pairs, perceptual_hash
from vlmrm.data.media import media_key, open_image
from vlmrm.errors import DataError, RowError

CHUNK = 500  # rows whose images are opened together

Look = tuple[str, int | None]  # a digest of an image's pixels and its perceptual hash, which one of one grey lacks


@dataclass(frozen=True)
class Split:
    """Which rows are held out, and how they came to be: `moved` would be in the other part but for their images."""

    held_out: np.ndarray  # bool [rows]
    prompts: int
    held_out_prompts: int
    moved: int


def split_rows(rows: Iterable[tuple[Comparison, str]], fraction: float, seed: int) -> Split:
    """Split comparisons, each with the folder of its file, by prompt.

    The side is that of `eval_fraction`. Prompts whose rows have images that look alike are on one side, that of the
    prompt among them which comes first in the order of its key.
    """
    keys: list[str] = []
    looks: dict[str, Look] = {}
    images: dict[str, set[str]] = defaultdict(set)  # media keys by prompt
    remaining = iter(rows)
    with ThreadPoolExecutor() as pool:  # Pillow decodes and resizes outside the interpreter's lock
        while chunk := list(islice(remaining, CHUNK)):
            unseen: dict[str, tuple[str, Medium]] = {}
            for row, folder in chunk:
                keys.append(key := "\0".join(split_key(row, folder)))
                for medium in _images(row):
                    images[key].add(name := media_key(medium.reference))
                    if name not in looks:
                        unseen[name] = (row.id, medium)
            looks.update(zip(unseen, pool.map(_look, unseen.values()), strict=True))
    groups = _Groups(images)
    for first, second in _alike(looks):
        groups.join(first, second)
    sides = {key: is_held_out_key(groups.of(key), fraction, seed) for key in keys}
    held_out = np.array([sides[key] for key in keys], dtype=bool)
    if held_out.all() or not held_out.any():
        side = "training" if held_out.all() else "evaluation"
        count = len({groups.of(key) for key in keys})
        raise DataError(
            f"fraction {fraction} leaves no rows for {side}: {len(keys)} rows have {len(sides)} prompts, and {count} "
            "where those of images that look alike are kept together; choose another fraction or seed"
        )
    moved = sum(sides[key] != is_held_out_key(key, fraction, seed) for key in keys)
    return Split(held_out, len(sides), sum(sides.values()), moved)


class _Groups:
    """Prompts that belong together, as their rows share an image; a group is named by its first key."""

    def __init__(self, images: dict[str, set[str]]):
        self.parents: dict[str, str] = {}
        self.prompt_of: dict[str, str] = {}
        for key, names in images.items():
            for name in names:
                self._join_prompts(key, self.prompt_of.setdefault(name, key))

    def of(self, key: str) -> str:
        root = key
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        while key != root:
            self.parents[key], key = root, self.parents[key]
        return root

    def join(self, first_image: str, second_image: str) -> None:
        self._join_prompts(self.prompt_of[first_image], self.prompt_of[second_image])

    def _join_prompts(self, first: str, second: str) -> None:
        low, high = sorted((self.of(first), self.of(second)))
        self.parents[high] = low


def _images(row: Comparison) -> list[Medium]:
    """Return the images of a row; a video is its prompt's alone, as nothing compares videos."""
    media = media_of([*row.prompt, *(message for answer in row.answers for message in answer)])
    frames = [Image(frame) for it in media if isinstance(it.reference, tuple) for frame in it.reference]
    return [*(it for it in media if isinstance(it, Image)), *frames]


def _look(item: tuple[str, Medium]) -> Look:
    row_id, medium = item
    try:
        image = open_image(medium.reference)
    except RowError as error:
        raise type(error)(error.reason, row_id) from error
    return media_key(image), perceptual_hash(image)


def _alike(looks: dict[str, Look]) -> Iterable[tuple[str, str]]:
    """Yield pairs of images, by media key, that have the same pixels or are near by their hashes."""
    by_digest: dict[str, str] = {}
    by_hash: dict[int, str] = {}
    for name, (digest, look) in looks.items():
        yield by_digest.setdefault(digest, name), name
        if look is not None:
            yield by_hash.setdefault(look, name), name
    hashes = np.array(sorted(by_hash), dtype=np.uint64)
    for i, j in near_pairs(hashes, hashes):
        if i < j:
            yield by_hash[int(hashes[i])], by_hash[int(hashes[j])]
