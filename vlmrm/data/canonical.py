"""The canonical form of comparisons, which `vlmrm convert` writes: rows that read back as the same comparisons.

Prompts and answers are messages. A pair is `prompt`, `chosen` and `rejected` where the better answer comes first, any
other comparison `prompt`, `responses` and `scores` or `ranks`, so that the file keeps the order in which answers were
shown. Every row is read back before it is written.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image

from vlmrm.conversation import Comparison, Messages
from vlmrm.data.columns import CRITIQUE
from vlmrm.data.comparisons import iterate_readable
from vlmrm.data.media import encoded_media, png_of
from vlmrm.data.rows import read_row, with_row_id
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.files import atomic_write, make_folder
from vlmrm.formats.openai import write_messages

logger = logging.getLogger("vlmrm")

HELD_OUT = "held_out.jsonl"
FORMATS = {"jpeg": b"\xff\xd8", "gif": b"GIF8", "webp": b"RIFF"}  # what their files begin with

Store = Callable[[Any, str], Any]  # of a media reference and its kind: what a file stores


def canonical(comparison: Comparison) -> Comparison:
    """Return a comparison as its canonical row reads, with the values of a preference as ranks."""
    if not comparison.judgements:
        raise RowError("its answers are not judged: there is no preference to write", comparison.id)
    kept = {name: value for name, value in comparison.columns.items() if value == value}  # NaN is an empty cell
    comparison = replace(comparison, columns=kept)
    if len(comparison.judgements) > 1:
        return comparison
    judgement = comparison.judgement
    if judgement.kind != "preference":
        return comparison
    ranks = tuple(-float(_rank(value, comparison.ratings)) for value in comparison.ratings)
    order = tuple(range(len(ranks)))
    return replace(comparison, judgements=(replace(judgement, answers=order, values=ranks),))


def _rank(value: float, values: Sequence[float]) -> int:
    return 1 + sum(better > value for better in values)


def write_row(comparison: Comparison, store: Store = lambda reference, kind: reference) -> dict[str, Any]:
    """Return the row of a comparison that is `canonical`, with what `store` makes of its media references."""
    for pair in (True, False):
        with suppress(RowError):
            row = _row(comparison, pair, lambda reference, kind: reference)
            again = read_row(row, comparison.id, lambda it: it, outputs=None, critiques=bool(comparison.critiques))
            if canonical(again) == comparison:
                return _row(comparison, pair, store)
    raise RowError("the canonical form cannot express it: see docs/data.md", comparison.id)


def _row(comparison: Comparison, pair: bool, store: Store) -> dict[str, Any]:
    def written(messages: Messages) -> list[dict[str, Any]]:
        turns = write_messages(messages)
        for part in (part for turn in turns for part in turn["content"] if part["type"] != "text"):
            part[part["type"]] = store(part[part["type"]], part["type"])
        return turns

    row: dict[str, Any] = {"id": comparison.id, "prompt": written(comparison.prompt) or None}
    judgement, values, answers = comparison.judgement, comparison.ratings, [*map(written, comparison.answers)]
    # One judgement that columns of scores or ranks say in full.
    plain = len(comparison.judgements) == 1 and judgement.kind in ("preference", "rating")
    plain = plain and len(answers) > 1 and judgement.dimension is judgement.rater is None
    ranked = plain and judgement.kind == "preference"
    if pair and ranked and comparison.is_pair():
        row |= {"chosen": answers[0], "rejected": answers[1], "tie": True if values[0] == values[1] else None}
    else:
        ratings = {"ranks": [_rank(value, values) for value in values]} if ranked else {"scores": [*values]}
        row |= {"prompt": row["prompt"] or [], "responses": answers, **ratings}
    if plain:
        row |= {"margin": judgement.margin, "weight": None if judgement.weight == 1 else judgement.weight}
    else:
        row["judgements"] = [asdict(it) for it in comparison.judgements]
    row |= {"category": comparison.category, CRITIQUE: [*comparison.critiques] or None}
    if both := sorted(row.keys() & comparison.columns.keys()):
        raise RowError(f"its column `{both[0]}` is one of the canonical form: rename it", comparison.id)
    return {name: value for name, value in {**row, **comparison.columns}.items() if value is not None}


def write_comparisons(rows: Callable[[], Iterable[Comparison]], path: Path, *, absolute: bool = False) -> int:
    """Write comparisons to a jsonl file, and return their number.

    Paths of media are relative to the file where they are below its folder, unless `absolute`. Media without a path
    are data URIs.
    """
    check_output(path)
    store = partial(_stored, folder=None if absolute else path.parent)
    make_folder(path.parent)
    count = 0
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in map(canonical, rows()):
            with with_row_id(row.id):
                file.write(json.dumps(write_row(row, store), ensure_ascii=False) + "\n")
            count += 1
    return count


def write_held_out(dataset: Any, folder: Path) -> None:
    """Write the rows that `eval_fraction` holds out to `HELD_OUT` in a training's folder, for evaluations after it.

    Rows that the canonical form cannot express leave the file out, with a line in the log: the training goes on.
    """
    file = folder / HELD_OUT
    try:
        count = write_comparisons(partial(iterate_readable, dataset), file, absolute=True)
    except DataError as error:
        logger.warning("%s is not written: %s", file, error)
    else:
        logger.info("The %d held-out rows are in %s", count, file)


def check_output(path: Path) -> None:
    """Refuse an output of a kind that is not written."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"{path} is of no kind that is written: name a .jsonl file.")


def _stored(reference: Any, kind: str, folder: Path | None) -> Any:
    """Return a reference as the file has it: a path, or the data URI of what has none."""
    if isinstance(reference, (list, tuple)):  # the frames of a video
        return [_stored(frame, "image", folder) for frame in reference]
    if isinstance(reference, (str, os.PathLike)):
        return _located(os.fspath(reference), folder)
    content = png_of(reference) if isinstance(reference, PIL.Image.Image) else encoded_media(reference, kind)
    form = next((it for it, first in FORMATS.items() if content.startswith(first)), "png")
    return f"data:{kind}/{'mp4' if kind == 'video' else form};base64,{base64.b64encode(content).decode()}"


def _located(path: str, folder: Path | None) -> str:
    """Return a path relative to a folder that it is below, else the absolute one."""
    if path.startswith(("data:", "http://", "https://")):
        return path
    below = folder is not None and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
    return os.path.relpath(path, folder) if below else os.path.abspath(path)
