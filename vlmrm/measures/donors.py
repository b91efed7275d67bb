"""The rows that interventions draw: the sample of the comparisons that they run on, and the donors of each.

Both depend on the data set alone, not on batches, processes or the order in which rows are scored.
"""

from __future__ import annotations

import filecmp
import os
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from vlmrm.conversation import Comparison, media_of, text_of
from vlmrm.data.media import media_key
from vlmrm.errors import MediaError

DONORS = 2  # of each row
# Sizes of the blocks of rows in which a donor is looked for, one after another: the first is that of a batch.
BLOCKS = (8, 16, 32, 64)


EPISODE = "chosen_episode"  # a column of pairs of episodes, which may all have one prompt: the task
WHOLE = "prompt"  # the value of `cluster_by` that takes each question about an image by itself


def cluster_of(comparison: Comparison, cluster_by: str | None = None) -> str:
    """Return a key of what rows share that are no independent witnesses: the unit of intervals and of samples.

    By default it is the images and videos of the prompt: all questions about them are one. Without any it is the text,
    without a prompt the answers, and of pairs of episodes the better one. `cluster_by` names a column in its place.
    """
    if cluster_by not in (None, WHOLE) and (value := comparison.columns.get(cluster_by)) is not None:
        return str(value)
    if (episode := comparison.columns.get(EPISODE)) is not None:
        return "/".join(Path(str(episode)).parts[-2:])
    seen = bool(media_of(comparison.prompt)) and cluster_by != WHOLE
    digest = blake2b(digest_size=8)
    for messages in [comparison.prompt] if comparison.prompt else comparison.answers:
        digest.update(b"" if seen else text_of(messages).encode())
        for medium in media_of(messages):
            reference = medium.reference
            # A file by its name and folder, so that a data set has the same ids wherever it is stored.
            named = isinstance(reference, str) and not reference.startswith("data:")
            digest.update(("/".join(Path(reference).parts[-2:]) if named else media_key(reference)).encode())
    return digest.hexdigest()


def is_sampled(comparison: Comparison, share: float, cluster_by: str | None = None) -> bool:
    """Return whether a comparison is in the sample of a `share` of all clusters, by a hash of its own.

    A cluster is in it with all its comparisons, and a larger share has those of a smaller one.
    """
    try:
        key = blake2b(cluster_of(comparison, cluster_by).encode(), digest_size=8).hexdigest()
        return share >= 1 or int(key, 16) < share * 2**64
    except MediaError:
        return False  # scoring the row reports it


class Traits(NamedTuple):
    """The properties of a row that decide which rows it may be a donor of; small enough to keep for many rows."""

    kinds: tuple[str, ...]  # of the media in the prompt
    question: str
    answers: frozenset[str]
    pictures: frozenset[str]  # of prompt and answers
    category: str | None


def traits_of(comparison: Any) -> Traits | None:
    """Return what `donors_of` compares; None for a row without a prompt, or with a medium that is no reference."""
    if not isinstance(comparison, Comparison) or not comparison.prompt:
        return None
    pieces = (comparison.prompt, *comparison.answers)
    try:
        pictures = frozenset(media_key(medium.reference) for messages in pieces for medium in media_of(messages))
    except MediaError:
        return None  # scoring the row reports it
    kinds = tuple(medium.kind for medium in media_of(comparison.prompt))
    answers = frozenset(text for answer in comparison.answers if (text := text_of(answer)))
    return Traits(kinds, text_of(comparison.prompt), answers, pictures, comparison.category)


def donors_of(
    comparison: Any, index: int, dataset: Any, traits: dict[int, Traits | None] | None = None, count: int = DONORS
) -> tuple[Comparison, ...]:
    """Draw up to `count` near rows of `dataset` with prompts that are irrelevant to this row's answers.

    None shares a picture with the row or with another donor, in prompt or answers. If it has the same question, it
    shares no answer either, where there are others: many data sets hold a row and its mirror, the same answers about a
    picture for which the other one is right. Rows of the same category, with as many images and videos, come first.

    A donor is row `index ^ step`, with steps in an order drawn for the block. In a batch of eight, its prompt and
    images are computed anyway. Rows in `traits`, by index, are not read again; those of further rows are added.
    """
    traits = {} if traits is None else traits
    if index not in traits:
        traits[index] = traits_of(comparison)
    row = traits[index]
    if row is None:
        return ()
    ranked: list[tuple[int, int, int, Traits]] = []
    for order, candidate in enumerate(_near(index)):
        if candidate >= len(dataset):
            continue
        if candidate not in traits:
            traits[candidate] = traits_of(dataset[candidate]["comparison"])
        donor = traits[candidate]
        if donor is None or bool(donor.kinds) != bool(row.kinds):
            continue
        same_question = donor.question == row.question
        if (same_question and not row.kinds) or _share_pictures(donor, row):
            continue
        mirror = same_question and bool(donor.answers & row.answers)
        differences = 4 * mirror + 2 * (donor.kinds != row.kinds) + (donor.category != row.category)
        ranked.append((differences, order, candidate, donor))
        drawn = _drawn(ranked, count)
        if len(drawn) == count and not any(differences for differences, *_ in drawn):
            break
    return tuple(dataset[candidate]["comparison"] for _, _, candidate, _ in _drawn(ranked, count))


def _near(index: int) -> Iterator[int]:
    """Yield the rows of the blocks around `index`; the order of the steps is the same for all rows of a block."""
    for start, end in zip((1, *BLOCKS), BLOCKS, strict=False):
        steps = list(range(start, end))
        random.Random(f"{end}:{index // end}").shuffle(steps)
        yield from (index ^ step for step in steps)


def _drawn(ranked: list[tuple[int, int, int, Traits]], count: int) -> list[tuple[int, int, int, Traits]]:
    """Return the `count` most alike of the rows, of equal ones the nearest, which share no picture."""
    drawn: list[tuple[int, int, int, Traits]] = []
    for entry in sorted(ranked, key=lambda entry: entry[:2]):
        donor = entry[-1]
        repeated = any(_share_pictures(donor, earlier) for *_, earlier in drawn)
        repeated = repeated or (not donor.kinds and any(donor.question == earlier.question for *_, earlier in drawn))
        if not repeated:
            drawn.append(entry)
        if len(drawn) == count:
            break
    return drawn


def _share_pictures(one: Traits, other: Traits) -> bool:
    """Return whether two rows have a picture in common: a file may be a copy of another."""
    return any(
        a == b or (os.path.isfile(a) and os.path.isfile(b) and filecmp.cmp(a, b, shallow=False))
        for a in one.pictures
        for b in other.pictures
    )
