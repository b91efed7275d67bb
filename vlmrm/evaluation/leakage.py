"""`vlmrm leakage`: evaluation rows whose prompts, answers or images are, exactly or nearly, in the training data.

A prompt or answer is its text and its images together: "What is this?" about two photos is two prompts. *Exact* is the
same text and the same pixels, whatever the file is called. *Near* is the same text but for case, width, white space
and punctuation, with images whose perceptual hashes differ in at most 4 of 64 bits: re-encoded, resized or lightly
retouched. Crops, mirror images and paraphrases are not found; the hash does not see colour, and an image of one grey
has none. A video file is the same where its path or its embedded bytes are; a list of frames is images.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vlmrm.conversation import Comparison, Medium, Messages, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import iterate_comparisons, load_comparisons
from vlmrm.data.duplicates import Look, Looks, images_of, near_pairs
from vlmrm.errors import RowError

KIND_NAMES = {"prompt": "a prompt", "answer": "an answer", "image": "an image"}
KINDS = tuple(KIND_NAMES)
MAX_LISTED = 20  # rows that are named; all are counted


@dataclass(frozen=True)
class Overlap:
    """The evaluation rows that share a prompt, answer or image with a training row."""

    pairs: list[tuple[str, str]]  # (training id, evaluation id), one for each such row
    total: int  # rows that have such a part

    @property
    def rows(self) -> int:
        return len(self.pairs)

    @property
    def share(self) -> float:
        """Return the share of `total` that overlaps; NaN if `total` is 0."""
        return self.rows / self.total if self.total else float("nan")


@dataclass(frozen=True)
class Leakage:
    """Overlaps by kind (`prompt`, `answer`, `image`); an exact overlap is a near one too."""

    exact: Mapping[str, Overlap]
    near: Mapping[str, Overlap]
    rows: int  # of the evaluation
    unreadable: list[tuple[str, str]]  # the rows of either side that could not be read, as (id, reason)

    @property
    def leaked(self) -> set[str]:
        """Return the ids of the evaluation rows whose prompt or an image was trained on, exactly or nearly.

        An answer alone is no leak: many questions are answered by "Yes.".
        """
        return {row_id for kind in ("prompt", "image") for _, row_id in self.near[kind].pairs}

    def block(self) -> dict[str, Any]:
        """Return the counts, with the first 20 pairs and reasons, as plain values for JSON."""
        overlaps = {
            name: {
                kind: {
                    "rows": overlap.rows,
                    "total": overlap.total,
                    "share": overlap.share if overlap.total else None,
                    "pairs": [list(pair) for pair in overlap.pairs[:MAX_LISTED]],
                }
                for kind, overlap in by_kind.items()
            }
            for name, by_kind in (("exact", self.exact), ("near", self.near))
        }
        return {
            "rows": self.rows,
            "leaked_rows": len(self.leaked),
            **overlaps,
            "unreadable_rows": len(self.unreadable),
            "unreadable": [list(row) for row in self.unreadable[:MAX_LISTED]],
        }


class Piece(NamedTuple):
    """A text with its images: a prompt, an answer, or an image alone."""

    text: str
    images: tuple[Look, ...]

    @property
    def first(self) -> int | str | None:
        """Return the perceptual hash of the first image; of one without, its digest."""
        if not self.images:
            return None
        return self.images[0].digest if self.images[0].hash is None else self.images[0].hash


Row = tuple[str, dict[str, set[Piece]]]  # the id of a comparison and its pieces by kind


def leakage(train: Iterable[Comparison | RowError], evaluation: Iterable[Comparison | RowError]) -> Leakage:
    """Return the rows of `evaluation` that are in `train`. Each distinct image of both is opened once.

    Rows come as `load_comparisons` reads them; one that cannot be read, or whose image cannot, is in `unreadable`.
    """
    looks = Looks()
    unreadable: list[tuple[str, str]] = []
    trained = list(_rows(train, looks, unreadable))
    of_training = len(unreadable)
    evaluated = list(_rows(evaluation, looks, unreadable))
    exact, near = zip(*(_overlaps(trained, evaluated, kind) for kind in KINDS), strict=True)
    count = len(evaluated) + len(unreadable) - of_training
    return Leakage(dict(zip(KINDS, exact, strict=True)), dict(zip(KINDS, near, strict=True)), count, unreadable)


def normalised(text: str) -> str:
    """Return `text` without differences of case, width, white space and punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_WITHOUT_PUNCTUATION).split())


class _Punctuation(dict[int, int | None]):
    """A table for `str.translate` that drops punctuation, filled as characters come."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)).startswith("P") else code
        return self[code]


_WITHOUT_PUNCTUATION = _Punctuation()


def _overlaps(trained: list[Row], evaluated: list[Row], kind: str) -> tuple[Overlap, Overlap]:
    """Return the exact and the near overlap of a kind of piece."""
    first_id: dict[Piece, str] = {}
    for row_id, pieces in trained:
        for piece in pieces[kind]:
            first_id.setdefault(piece, row_id)
    rows = [(row_id, pieces[kind]) for row_id, pieces in evaluated if pieces[kind]]
    near = _near_finder(first_id, {piece for _, pieces in rows for piece in pieces})
    pairs: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for row_id, pieces in rows:
        for found, find in zip(pairs, (first_id.get, near), strict=True):
            if ids := [train_id for piece in pieces if (train_id := find(piece)) is not None]:
                found.append((min(ids), row_id))
    return Overlap(pairs[0], len(rows)), Overlap(pairs[1], len(rows))


def _near_finder(trained: dict[Piece, str], evaluated: set[Piece]) -> Callable[[Piece], str | None]:
    """Return a search among the pieces of the same normalised text whose first images are near."""
    by_text_and_first = defaultdict(list)
    for piece in trained:
        by_text_and_first[normalised(piece.text), piece.first].append(piece)
    left, right = (
        np.array(sorted({first for piece in pieces if isinstance(first := piece.first, int)}), dtype=np.uint64)
        for pieces in (evaluated, trained)
    )
    near: dict[int | str | None, list[int]] = {first: [] for first in left.tolist()}
    for i, j in near_pairs(left, right):
        near[int(left[i])].append(int(right[j]))

    def find(piece: Piece) -> str | None:
        text = normalised(piece.text)
        if not text and not piece.images:  # nothing but punctuation
            return trained.get(piece)
        for first in near.get(piece.first, [piece.first]):
            for candidate in by_text_and_first.get((text, first), []):
                pairs = zip(piece.images, candidate.images, strict=False)
                if len(piece.images) == len(candidate.images) and all(a.is_near(b) for a, b in pairs):
                    return trained[candidate]
        return None

    return find


def _rows(
    comparisons: Iterable[Comparison | RowError], looks: Looks, unreadable: list[tuple[str, str]]
) -> Iterator[Row]:
    """Yield the pieces of each row; one that cannot be read goes to `unreadable`."""
    for comparison in looks.through(comparisons, _images):
        try:
            if isinstance(comparison, RowError):
                raise comparison
            yield comparison.id, _pieces(comparison, looks)
        except RowError as error:
            name = comparison.id if isinstance(comparison, Comparison) else str(error.row_id)
            unreadable.append((name, error.reason))


def _images(comparison: Comparison | RowError) -> Iterator[Medium]:
    if isinstance(comparison, Comparison):
        for messages in (comparison.prompt, *comparison.answers):
            yield from images_of(messages)


def _pieces(comparison: Comparison, looks: Looks) -> dict[str, set[Piece]]:
    def piece(messages: Messages) -> Piece:
        return Piece(text_of(messages), tuple(looks.of(it, comparison.id) for it in images_of(messages)))

    prompts = {piece((*comparison.prompt, *answer[:-1])) for answer in comparison.answers}
    answers = {piece(answer[-1:]) for answer in comparison.answers}
    images = {Piece("", (image,)) for it in prompts | answers for image in it.images}
    kinds = zip(KINDS, (prompts, answers, images), strict=True)
    return {kind: {it for it in of_kind if it.text.strip() or it.images} for kind, of_kind in kinds}


def open_rows(paths: Sequence[str], arguments: DataArguments, split: str = "train") -> Iterator[Comparison | RowError]:
    """Return all rows of `paths`."""
    return iterate_comparisons(load_comparisons(paths, arguments=arguments, split=split))


def format_leakage(result: Leakage) -> str:
    """Return the counts by kind, the rows that leak and those that could not be read, as plain text."""
    lines = [
        f"{result.rows:,} evaluation rows, of which the training data have",
        f"{'':12}{'exactly':>18}{'nearly':>18}",
    ]
    for kind in KINDS:
        exact, near = result.exact[kind], result.near[kind]
        counts = "".join(f"{f'{overlap.rows:,} of {overlap.total:,}':>18}" for overlap in (exact, near))
        lines.append(f"  {KIND_NAMES[kind]:<10}{counts if near.total else '    no row has one'}")
    sections = ["\n".join(lines)]
    for kind in ("prompt", "image"):
        if pairs := result.near[kind].pairs:
            named = [f"{row} = {train}" for train, row in pairs]
            sections.append(_listed(f"rows with {KIND_NAMES[kind]} that was trained on (row = training row)", named))
    if result.unreadable:
        named = [f"{row}: {why}" for row, why in result.unreadable]
        sections.append(_listed("rows that could not be read", named))
    return "\n\n".join([*sections, verdict(result)])


def _listed(head: str, lines: Sequence[str]) -> str:
    """Return a heading and the first lines under it."""
    more = [f"  ... and {len(lines) - MAX_LISTED:,} more"] if len(lines) > MAX_LISTED else []
    return "\n".join([head, *(f"  {line}" for line in lines[:MAX_LISTED]), *more])


def verdict(result: Leakage) -> str:
    """Return one line: how many evaluation rows leak."""
    sentence = f"{len(result.leaked):,} of {result.rows:,} evaluation rows have a prompt or image that was trained on"
    return sentence + (f"; {len(result.unreadable):,} could not be read" if result.unreadable else "")
