"""The canonical form of comparisons, which `vlmrm convert` writes: rows that read back as the same comparisons.

A pair is `prompt`, `chosen` and `rejected`, a list `prompt`, `responses` and `scores` or `ranks`. Where all prompts
and answers of a file are texts, the media of the prompt are in `images` and `videos`; else all are messages. Pairs are
lists of two where the better answer is not always the first, so that the file keeps the order in which answers were
shown. Every row is read back before it is written.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image

from vlmrm.conversation import Comparison, Messages, media_of
from vlmrm.data.comparisons import iterate_readable
from vlmrm.data.media import encoded_media, png_of
from vlmrm.data.rows import read_row, with_row_id
from vlmrm.errors import ConfigError, DataError, RowError, first_line
from vlmrm.files import atomic_write, make_folder
from vlmrm.formats.openai import write_messages

logger = logging.getLogger("vlmrm")

HELD_OUT = "held_out.jsonl"
SUFFIXES = (".parquet", ".jsonl")
FORMATS = {"jpeg": b"\xff\xd8", "gif": b"GIF8", "webp": b"RIFF"}  # what their files begin with
CHUNK = 500  # rows in memory, and in a row group

Rows = Callable[[], Iterable[Comparison]]  # which can be passed over twice
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
    if judgement.kind == "rating":
        return comparison
    ranks = tuple(-float(_rank(value, comparison.ratings)) for value in comparison.ratings)
    order = tuple(range(len(ranks)))
    return replace(comparison, judgements=(replace(judgement, answers=order, values=ranks),))


def _rank(value: float, values: Sequence[float]) -> int:
    return 1 + sum(better > value for better in values)


class Forms(NamedTuple):
    """Whether all prompts and answers of a file are texts, and the better answer of all pairs is the first.

    A column of a table has one type, and a table one form of pairs.
    """

    texts: bool = True
    pairs: bool = True


def write_row(
    comparison: Comparison, forms: Forms, store: Store = lambda reference, kind: reference
) -> dict[str, Any]:
    """Return the row of a comparison that is `canonical`, with what `store` makes of its media references."""

    def written(messages: Messages) -> Any:
        if forms.texts:
            return messages[-1].text if messages else ""
        turns = write_messages(messages)
        for part in (part for turn in turns for part in turn["content"] if part["type"] != "text"):
            part[part["type"]] = store(part[part["type"]], part["type"])
        return turns

    row: dict[str, Any] = {"id": comparison.id, "prompt": written(comparison.prompt)}
    if forms.texts:
        row["system"] = comparison.prompt[0].text if len(comparison.prompt) > 1 else None
        for kind in ("image", "video"):
            media = [store(it.reference, kind) for it in media_of(comparison.prompt) if it.kind == kind]
            row[f"{kind}s"] = media or None
    judgement, values, answers = comparison.judgement, comparison.ratings, [*map(written, comparison.answers)]
    ranked = len(comparison.judgements) == 1 and judgement.kind == "preference"
    if pair := forms.pairs and ranked and comparison.is_pair():
        row |= {"chosen": answers[0], "rejected": answers[1], "tie": True if values[0] == values[1] else None}
    else:
        ratings = {"ranks": [_rank(value, values) for value in values]} if ranked else {"scores": [*values]}
        row |= {"responses": answers, **ratings}
    if pair and not comparison.prompt:
        del row["prompt"]
    if len(comparison.judgements) == 1:
        row |= {"margin": judgement.margin, "weight": None if judgement.weight == 1 else judgement.weight}
    else:
        row["judgements"] = [asdict(it) for it in comparison.judgements]
    row["category"] = comparison.category
    if both := sorted(row.keys() & comparison.columns.keys()):
        raise RowError(f"its column `{both[0]}` is one of the canonical form: rename it", comparison.id)
    return {name: value for name, value in {**row, **comparison.columns}.items() if value is not None}


def choose_forms(comparisons: Iterable[Comparison]) -> Forms:
    """Return the shortest forms in which all comparisons, each `canonical`, read back as they are."""
    forms = Forms()
    for comparison in comparisons:
        options = (Forms(texts, pairs) for texts in {forms.texts, False} for pairs in {forms.pairs, False})
        fits = (option for option in sorted(options, reverse=True) if _reads_back(comparison, option))
        if (chosen := next(fits, None)) is None:
            raise RowError("the canonical form cannot express it: see docs/data.md", comparison.id)
        forms = chosen
    return forms


def _reads_back(comparison: Comparison, forms: Forms) -> bool:
    row = write_row(comparison, forms)
    try:
        return canonical(read_row(row, comparison.id, lambda reference: reference)) == comparison
    except RowError:
        return False


def write_comparisons(rows: Rows, path: Path, *, embed: bool = False, absolute: bool = False) -> int:
    """Write comparisons to a parquet or jsonl file, and return their number.

    Paths of media are relative to the file where they are below its folder, unless `absolute`. With `embed` a parquet
    file holds the media themselves. Media without a path stay embedded, in jsonl as data URIs.
    """
    check_output(path, embed)
    forms = choose_forms(map(canonical, rows()))
    folder = None if absolute else path.parent

    def written(store: Store) -> Iterator[dict[str, Any]]:
        for row in map(canonical, rows()):
            with with_row_id(row.id):
                yield write_row(row, forms, store)

    make_folder(path.parent)
    with atomic_write(path) as temporary:
        if path.suffix == ".parquet":
            cells = partial(_cell, folder=folder, embed=embed)
            # The first pass, without the content of media, is for the types of columns.
            return _write_parquet(written(cells), written(partial(cells, empty=True)), temporary, path)
        count = 0
        with open(temporary, "w", encoding="utf-8") as file:
            for row in written(partial(_text, folder=folder)):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
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


def check_output(path: Path, embed: bool = False) -> None:
    """Refuse an output of no kind that is written, and embedding in one that is text."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is of no kind that is written: name a {' or '.join(SUFFIXES)} file.")
    if embed and path.suffix != ".parquet":
        raise ConfigError(f"{path} cannot hold images: name a .parquet file, or leave --embed out.")


def _text(reference: Any, kind: str, folder: Path | None) -> Any:
    """Return a reference for jsonl: a path, or the data URI of what has none."""
    if isinstance(reference, (list, tuple)):  # the frames of a video
        return [_text(frame, "image", folder) for frame in reference]
    if isinstance(reference, (str, os.PathLike)):
        return _located(os.fspath(reference), folder)
    content = _content(reference, kind)
    form = next((it for it, first in FORMATS.items() if content.startswith(first)), "png")
    return f"data:{kind}/{'mp4' if kind == 'video' else form};base64,{base64.b64encode(content).decode()}"


def _cell(reference: Any, kind: str, folder: Path | None, embed: bool, empty: bool = False) -> Any:
    """Return a reference for parquet; with `empty` without its content."""
    if isinstance(reference, (list, tuple)):
        return [_cell(frame, "image", folder, embed, empty) for frame in reference]
    path = os.fspath(reference) if isinstance(reference, (str, os.PathLike)) else None
    if path is not None and not embed:
        return {"bytes": None, "path": _located(path, folder)}
    name = None if path is None or path.startswith("data:") else os.path.basename(path)
    return {"bytes": b"" if empty else _content(reference, kind), "path": name}


def _located(path: str, folder: Path | None) -> str:
    """Return a path relative to a folder that it is below, else the absolute one."""
    if path.startswith(("data:", "http://", "https://")):
        return path
    below = folder is not None and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
    return os.path.relpath(path, folder) if below else os.path.abspath(path)


def _content(reference: Any, kind: str) -> bytes:
    return png_of(reference) if isinstance(reference, PIL.Image.Image) else encoded_media(reference, kind)


def _write_parquet(rows: Iterable[dict[str, Any]], layouts: Iterable[dict[str, Any]], file: Path, path: Path) -> int:
    """Write rows whose types are those of `layouts`, in groups of `CHUNK`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pa.unify_schemas(
            [pa.schema(list(pa.array(chunk).type)) for chunk in _chunks(layouts)], promote_options="permissive"
        )
        with pq.ParquetWriter(file, schema) as writer:
            count = 0
            for chunk in _chunks(rows):
                array = pa.array(chunk, type=pa.struct(list(schema)))
                writer.write_table(pa.Table.from_struct_array(array))
                count += len(chunk)
        return count
    except pa.ArrowException as error:
        raise DataError(
            f"{path} cannot hold these rows, as a column of them has values of several types ({first_line(error)}): "
            "name a .jsonl file"
        ) from error


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(rows)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk
