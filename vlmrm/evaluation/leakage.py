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
from typing import Any, NamedTuple, cast

import numpy as np
from datasets import Dataset

from vlmrm.conversation import Comparison, Medium, Messages, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import iterate_comparisons, load_comparisons
from vlmrm.data.duplicates import Look, Looks, images_of, near_pairs
from vlmrm.errors import RowError

KINDS = ("prompt", "answer", "image")
MAX_LISTED = 20  # rows that are named; all are counted
KIND_NAMES = {"prompt": "a prompt", "answer": "an answer", "image": "an image"}


@dataclass(frozen=True)
class Overlap:
    """The evaluation rows that share a prompt, answer or image with a training row.

    `pairs` are (training id, evaluation id), one for each such row; `total` counts the rows that have such a part.
    """

    pairs: list[tuple[str, str]]
    total: int

    @property
    def rows(self) -> int:
        return len(self.pairs)

    @property
    def share(self) -> float:
        """Return the share of `total` that overlaps; NaN if `total` is 0."""
        return self.rows / self.total if self.total else float("nan")


@dataclass(frozen=True)
class Leakage:
    """Overlaps by kind (`prompt`, `answer`, `image`); an exact overlap is a near one too.

    `rows` is the number of evaluation rows; `unreadable` are the rows of either side that could not be read, as (id,
    reason).
    """

    exact: Mapping[str, Overlap]
    near: Mapping[str, Overlap]
    rows: int
    unreadable: list[tuple[str, str]]

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


class RowPieces(NamedTuple):
    """The pieces of a comparison by kind."""

    id: str
    pieces: Mapping[str, set[Piece]]


def leakage(train: Iterable[Comparison | RowError], evaluation: Iterable[Comparison | RowError]) -> Leakage:
    """Return the rows of `evaluation` that are in `train`. Each distinct image of both is opened once.

    Rows come as `load_comparisons` reads them; one that cannot be read, or whose image cannot, is in `unreadable`.
    """
    looks = Looks()
    unreadable: list[tuple[str, str]] = []
    trained = list(_rows(train, looks, unreadable))
    of_training = len(unreadable)
    evaluated = list(_rows(evaluation, looks, unreadable))
    return Leakage(
        exact={kind: _overlap(trained, evaluated, kind, _exact_finder) for kind in KINDS},
        near={kind: _overlap(trained, evaluated, kind, _near_finder) for kind in KINDS},
        rows=len(evaluated) + len(unreadable) - of_training,
        unreadable=unreadable,
    )


def normalised(text: str) -> str:
    """Return `text` without differences of case, width, white space and punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_WITHOUT_PUNCTUATION).split())


class _Punctuation(dict[int, int | None]):
    """A table for `str.translate` that drops punctuation, filled as characters come."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code)).startswith("P") else code
        return self[code]


_WITHOUT_PUNCTUATION = _Punctuation()

Finder = Callable[[Piece], str | None]


def _overlap(
    trained: list[RowPieces],
    evaluated: list[RowPieces],
    kind: str,
    finder: Callable[[dict[Piece, str], set[Piece]], Finder],
) -> Overlap:
    first_id: dict[Piece, str] = {}
    for row in trained:
        for piece in row.pieces[kind]:
            first_id.setdefault(piece, row.id)
    rows = [row for row in evaluated if row.pieces[kind]]
    find = finder(first_id, {piece for row in rows for piece in row.pieces[kind]})
    pairs = []
    for row in rows:
        ids = [train_id for piece in row.pieces[kind] if (train_id := find(piece)) is not None]
        if ids:
            pairs.append((min(ids), row.id))
    return Overlap(pairs, len(rows))


def _exact_finder(trained: dict[Piece, str], evaluated: set[Piece]) -> Finder:
    return trained.get


def _near_finder(trained: dict[Piece, str], evaluated: set[Piece]) -> Finder:
    """Return a search among the pieces of the same normalised text whose first images are near."""
    by_text_and_first = defaultdict(list)
    for piece in trained:
        by_text_and_first[normalised(piece.text), _first(piece)].append(piece)
    near = _near_firsts(evaluated, trained)

    def find(piece: Piece) -> str | None:
        text = normalised(piece.text)
        if not text and not piece.images:  # nothing but punctuation
            return trained.get(piece)
        for first in near.get(_first(piece), [_first(piece)]):
            for candidate in by_text_and_first.get((text, first), []):
                if _all_near(piece.images, candidate.images):
                    return trained[candidate]
        return None

    return find


def _near_firsts(evaluated: Iterable[Piece], trained: Iterable[Piece]) -> dict[int | str | None, list[int]]:
    """Return, for the perceptual hash of each first image in `evaluated`, those in `trained` that are near."""
    left, right = (
        np.array(sorted({first for piece in pieces if isinstance(first := _first(piece), int)}), dtype=np.uint64)
        for pieces in (evaluated, trained)
    )
    near = defaultdict(list, {first: [] for first in left.tolist()})
    for i, j in near_pairs(left, right):
        near[int(left[i])].append(int(right[j]))
    return near


def _first(piece: Piece) -> int | str | None:
    if not piece.images:
        return None
    return piece.images[0].digest if piece.images[0].hash is None else piece.images[0].hash


def _all_near(images: tuple[Look, ...], candidates: tuple[Look, ...]) -> bool:
    return len(images) == len(candidates) and all(map(Look.is_near, images, candidates))


def _rows(
    comparisons: Iterable[Comparison | RowError], looks: Looks, unreadable: list[tuple[str, str]]
) -> Iterator[RowPieces]:
    """Yield the pieces of each row; one that cannot be read goes to `unreadable`."""
    for comparison in looks.through(comparisons, _images):
        try:
            if isinstance(comparison, RowError):
                raise comparison
            yield _row(comparison, looks)
        except RowError as error:
            name = comparison.id if isinstance(comparison, Comparison) else str(error.row_id)
            unreadable.append((name, error.reason))


def _images(comparison: Comparison | RowError) -> Iterator[Medium]:
    if isinstance(comparison, Comparison):
        for messages in (comparison.prompt, *comparison.answers):
            yield from images_of(messages)


def _row(comparison: Comparison, looks: Looks) -> RowPieces:
    def piece(messages: Messages) -> Piece:
        return Piece(text_of(messages), tuple(looks.of(it, comparison.id) for it in images_of(messages)))

    prompts = {piece((*comparison.prompt, *answer[:-1])) for answer in comparison.answers}
    answers = {piece(answer[-1:]) for answer in comparison.answers}
    images = {Piece("", (image,)) for it in prompts | answers for image in it.images}
    pieces = dict(zip(KINDS, (prompts, answers, images), strict=True))
    return RowPieces(
        comparison.id, {kind: {p for p in of_kind if p.text.strip() or p.images} for kind, of_kind in pieces.items()}
    )


def open_rows(paths: Sequence[str], arguments: DataArguments, split: str = "train") -> Iterator[Comparison | RowError]:
    """Return all rows of `paths`."""
    return iterate_comparisons(cast("Dataset", load_comparisons(paths, arguments=arguments, split=split)))


def format_leakage(result: Leakage) -> str:
    """Return the counts by kind, the rows that leak and those that could not be read, as plain text."""
    lines = [
        f"{result.rows:,} evaluation rows, of which the training data have",
        f"{'':12}{'exactly':>18}{'nearly':>18}",
    ]
    for kind in KINDS:
        exact, near = result.exact[kind], result.near[kind]
        counts = "".join(f"{f'{overlap.rows:,} of {overlap.total:,}':>18}" for overlap in (exact, near))
        lines.append(
            f"  {KIND_NAMES[kind]:<10}{counts}" if near.total else f"  {KIND_NAMES[kind]:<10}{'no row has one':>18}"
        )
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
