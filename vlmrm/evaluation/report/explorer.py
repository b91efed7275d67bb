"""All pairs of a report, packed for the page's script: columns of numbers, each text once, thumbnails for a budget.

The block is deflated and in base64: the length of its header as an unsigned 32-bit number; the header as JSON (paths,
thumbnails, names, and where each column is); the columns, little-endian, each at a multiple of 4 bytes; and, as JSON
again, the texts.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from PIL import Image

from vlmrm.data.media import open_image
from vlmrm.errors import RowError
from vlmrm.evaluation.report.checkpoints import Checkpoint
from vlmrm.measures.analysis import GROUP
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.pairs import PairArrays, pair_index

logger = logging.getLogger("vlmrm")

SIDE = 320  # pixels of a thumbnail, the longer one
IMAGES = 4  # of one prompt or answer

# What the page may hold. A longer page would open slowly; what is left out is said on it.
PAIRS = 100_000
MODELS = 8  # checkpoints, the one that the report is about and the most accurate others
CHARACTERS = 48_000_000  # of their texts
IMAGE_BYTES = 6_000_000  # of thumbnails
TEXTS = 10_000  # packed at a time

ROLES = {"prompt": ("prompt_text", "image_paths")} | {
    side: (f"{side}_text", f"{side}_image_paths") for side in ("chosen", "rejected")
}


class PackedPairs(NamedTuple):
    """The block for the page's script, and a sentence about each thing that it lacks."""

    data: str
    notes: list[str]


def pack_pairs(checkpoints: Sequence[Checkpoint], best: Checkpoint) -> PackedPairs:
    """Return the pairs of `best`, with the scores of the other checkpoints on them."""
    rows = _first(best.rows)
    models = [best, *sorted((c for c in checkpoints if c is not best), key=lambda c: -c.accuracy.value)][:MODELS]
    notes = []
    if len(rows) < len(best.rows):
        notes.append(f"Only the first {len(rows):,} of {len(best.rows):,} pairs can be explored here.")
    if len(models) < len(checkpoints):
        notes.append(f"It compares the {len(models)} most accurate of {len(checkpoints)} checkpoints.")
    arrays: dict[str, np.ndarray] = {"tie": rows["tie"].to_numpy(np.uint8)}
    header: dict[str, Any] = {"count": len(rows), "names": _names(rows)}
    header["views"] = {name: intervention.view for name, intervention in INTERVENTIONS.items()}
    header["models"] = _models(models, rows, arrays)
    header["groups"] = list(_groups(rows, arrays))
    texts = _texts(rows, arrays)
    paths, header["images"] = _paths(rows, arrays)
    header["paths"] = [str(Path(path).absolute()) for path in paths]
    header["thumbnails"] = _thumbnails(paths, header["images"], arrays, notes)
    return PackedPairs(_pack(header, arrays, texts), notes)


def _first(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first pairs, as many as the page may hold."""
    rows = rows.iloc[:PAIRS]
    characters = pd.Series(0, rows.index)
    for column in (column for column, _ in ROLES.values() if column in rows):
        characters += rows[column].fillna("").str.len()
    return rows[characters.cumsum() <= CHARACTERS]


def _pack(header: dict[str, Any], arrays: dict[str, np.ndarray], texts: Sequence[str]) -> str:
    """Return the block. A column is [kind, offset from the end of the header, length]; kinds are numpy's."""
    columns, offset = {}, 0
    for name, array in arrays.items():
        columns[name] = [array.dtype.str[1:], offset, len(array)]
        offset += array.nbytes + -array.nbytes % 4
    start = _json(header | {"columns": columns, "texts": offset})
    start += b" " * (-len(start) % 4)
    compressor, pieces = zlib.compressobj(6), []
    pieces.append(compressor.compress(len(start).to_bytes(4, "little") + start))
    for array in arrays.values():
        content = array.astype(array.dtype.newbyteorder("<")).tobytes()
        pieces.append(compressor.compress(content + bytes(-len(content) % 4)))
    for first in range(0, len(texts), TEXTS):  # by parts, as all at once would be in memory three times
        part = _json(texts[first : first + TEXTS])[1:-1]
        pieces.append(compressor.compress((b"," if first else b"[") + part))
    pieces.append(compressor.compress(b"]" if texts else b"[]") + compressor.flush())
    return base64.b64encode(b"".join(pieces)).decode()


def _json(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # half of a surrogate pair is no text


def _names(rows: pd.DataFrame) -> list[str]:
    """Return the comparison of each pair, with the pair's number where the comparison has several."""
    several = rows["comparison_id"].map(rows["comparison_id"].value_counts()).to_numpy() > 1
    numbers = rows["pair"].to_numpy(np.int64) + 1
    ids = rows["comparison_id"].astype(str)
    return [f"{name} #{number}" if many else name for name, number, many in zip(ids, numbers, several, strict=True)]


def _models(models: Sequence[Checkpoint], rows: pd.DataFrame, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return labels, interventions and accuracies of the models, and add the columns of their scores."""
    index, packed = pair_index(rows), []
    for number, model in enumerate(models):
        named = [name for name in INTERVENTIONS if model.rows.get(f"{name}_rejected", pd.Series()).notna().any()]
        arrays |= _scores(model, number, named, pair_index(model.rows).get_indexer(index))
        accuracies = {
            column: {value: _numbers(share) for value, share in model.shares(column).items()}
            for column in _columns(rows)
        }
        numbers = {"accuracy": _numbers(model.accuracy), "accuracies": accuracies}
        packed.append({"label": model.label, "interventions": named, **numbers})
    return packed


def _scores(model: Checkpoint, number: int, named: Sequence[str], at: np.ndarray) -> dict[str, np.ndarray]:
    """Return a model's columns for the rows at[N] of its own, NaN where that is -1.

    They are NUMBER/margin and NUMBER/rejected, with the name of an intervention between. Margins are packed in place
    of the chosen's scores, as the difference of two rounded scores could lose its sign.
    """
    # Ties of people have margins here, too: only their verdict is another.
    pairs, arrays = PairArrays(model.rows.assign(tie=False)), {}
    for name in ("", *named):
        columns = {
            "margin": pairs.altered_margins(name) if name else pairs.margins,
            "rejected": pairs.column(f"{name}_rejected" if name else "rejected_score"),
        }
        for column, values in columns.items():
            key = "/".join(filter(None, (str(number), name, column)))
            arrays[key] = np.where(at >= 0, values[at], np.nan).astype(np.float32)
    return arrays


def _numbers(share: Estimate) -> list[float | None]:
    """Return accuracy, the ends of its interval, and the number of pairs; NaN is no JSON."""
    return [None if np.isnan(number) else number for number in (*share[:3], share.n)]


def _columns(rows: pd.DataFrame) -> list[str]:
    return [name for name in map(str, rows) if name == "category" or name.startswith(GROUP)]


def _groups(rows: pd.DataFrame, arrays: dict[str, np.ndarray]) -> Iterable[dict[str, Any]]:
    """Yield the columns to filter by with their values; the code of a row is one more, 0 where it has none."""
    for column in _columns(rows):
        codes, values = pd.factorize(rows[column], sort=True)
        if len(values):
            arrays[f"group/{column}"] = (codes + 1).astype(np.uint32)
            yield {"column": column, "name": column.removeprefix(GROUP), "values": [str(value) for value in values]}


def _texts(rows: pd.DataFrame, arrays: dict[str, np.ndarray]) -> list[str]:
    """Return every text of the pairs once."""
    numbers: dict[str, int] = {}
    for role, (column, _) in ROLES.items():
        codes, texts = pd.factorize(rows[column].fillna("") if column in rows else np.full(len(rows), ""))
        codes_of_texts = [numbers.setdefault(str(text), len(numbers)) for text in texts]
        arrays[f"text/{role}"] = np.array(codes_of_texts, np.uint32)[codes]
    return list(numbers)


def _paths(rows: pd.DataFrame, arrays: dict[str, np.ndarray]) -> tuple[list[str], list[list[int]]]:
    """Return every path of an image once, and every list of images of a prompt or an answer as numbers of paths."""
    numbers: dict[str, int] = {}
    lists: dict[tuple[int, ...], int] = {(): 0}
    for role, (_, column) in ROLES.items():
        codes = np.zeros(len(rows), np.uint32)
        if column in rows:
            for i, value in enumerate(rows[column]):
                images = tuple(numbers.setdefault(path, len(numbers)) for path in paths_of(value))
                codes[i] = lists.setdefault(images, len(lists))
        arrays[f"images/{role}"] = codes
    return list(numbers), [list(images) for images in lists]


def _thumbnails(
    paths: Sequence[str], lists: Sequence[Sequence[int]], arrays: dict[str, np.ndarray], notes: list[str]
) -> dict[int, str]:
    """Return thumbnails by number of path, of mistakes first, the most confident first, then of the narrowest wins."""
    margins = arrays["0/margin"].astype(np.float64)
    order = np.argsort(np.where(np.isnan(margins), np.inf, margins), kind="stable")
    of_rows = (lists[arrays[f"images/{role}"][row]][:IMAGES] for row in order for role in ROLES)
    thumbnails: dict[int, str] = {}
    left = IMAGE_BYTES
    gone: list[str] = []
    for number in dict.fromkeys(chain.from_iterable(of_rows)):
        picture = thumbnail(paths[number])
        if picture is None:
            gone.append(paths[number])
            continue
        left -= len(picture)
        if left < 0:
            notes.append(
                f"{len(thumbnails):,} of {len(paths):,} images are on this page, those of mistakes first; of the "
                "others it has the paths."
            )
            return thumbnails
        thumbnails[number] = picture
    if gone:
        notes.append(f"{len(gone):,} images could not be opened.")
        logger.warning("The report lacks %s images that cannot be opened, such as %s", f"{len(gone):,}", gone[0])
    return thumbnails


def paths_of(value: Any) -> list[str]:
    """Return a cell with a list, which is an array after parquet, and None or NaN where the data have none."""
    return [] if value is None or isinstance(value, float) else [str(path) for path in value]


def thumbnail(path: str) -> str | None:
    """Return a JPEG of at most 320 x 320 pixels in base64; None if it cannot be opened."""
    try:
        image = open_image(path)
    except RowError as error:
        logger.debug("The report lacks the image %s: %s", path, error)
        return None
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=78, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
