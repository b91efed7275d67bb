"""The canonical form of comparisons, which `vlmrm convert` writes: rows that read back as the same comparisons.

A pair is `prompt`, `chosen` and `rejected` (or `chosen_image` and `rejected_image`), a list `prompt`, `responses` (or
`response_images`) and `scores` or `ranks`. Pairs are lists of two where the better answer is not always the first, so
that the file keeps the order in which answers were shown. The media of the prompt are in `images` and `videos`;
prompts and answers that are more than a text are messages. Every row is read back before it is written.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice, product, starmap
from pathlib import Path
from typing import Any

import PIL.Image

from vlmrm.conversation import Comparison, Image, Judgement, Message, Messages, Text, Video, media_of
from vlmrm.data.comparisons import iterate_readable
from vlmrm.data.media import encoded_media, png_of
from vlmrm.data.rows import read_row
from vlmrm.errors import ConfigError, DataError, RowError, first_line
from vlmrm.files import atomic_write, make_folder
from vlmrm.formats.openai import write_messages

logger = logging.getLogger("vlmrm")

HELD_OUT = "held_out.jsonl"
SUFFIXES = (".parquet", ".jsonl")
FORMATS = {"jpeg": b"\xff\xd8", "gif": b"GIF8", "webp": b"RIFF"}  # what their files begin with
CHUNK = 500  # rows in memory, and in a row group

Rows = Callable[[], Iterable[Comparison]]  # which can be passed over twice


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


@dataclass(frozen=True)
class Forms:
    """Whether the prompts and the answers of all rows are texts, and the better answer of all pairs is the first.

    A column of a table has one type, and a table one form of pairs.
    """

    prompts: bool = True
    answers: bool = True
    pairs: bool = True


def write_row(comparison: Comparison, forms: Forms) -> dict[str, Any]:
    """Return the row of a comparison that is `canonical`, with its media references as they are."""
    row: dict[str, Any] = {"id": comparison.id, **_write_prompt(comparison.prompt, forms)}
    judgement = comparison.judgement
    single = len(comparison.judgements) == 1
    pair = forms.pairs and comparison.is_pair() and judgement.kind == "preference" and single
    values = [*comparison.ratings]
    kind = _only_medium(comparison.answers)
    if kind and not (pair and kind == "video"):  # which has no columns of its own, but messages
        references = [media_of(answer)[0].reference for answer in comparison.answers]
        row |= _sides(references, "_image") if pair else {f"response_{kind}s": references}
    else:
        answers = [_write_answer(answer, forms) for answer in comparison.answers]
        row |= _sides(answers) if pair else {"responses": answers}
    if not pair:
        row.setdefault("prompt", "" if forms.prompts else [])
        ranked = judgement.kind == "preference" and single
        row |= {"ranks": [int(_rank(value, values)) for value in values]} if ranked else {"scores": values}
    if single:
        row |= {"margin": judgement.margin, "weight": None if judgement.weight == 1 else judgement.weight}
    else:
        row["judgements"] = [_write_judgement(judgement) for judgement in comparison.judgements]
    row |= {"tie": True if pair and values[0] == values[1] else None, "category": comparison.category}
    if both := sorted(row.keys() & comparison.columns.keys()):
        raise RowError(f"its column `{both[0]}` is one of the canonical form: rename it", comparison.id)
    return {name: value for name, value in {**row, **comparison.columns}.items() if value is not None}


def _write_judgement(judgement: Judgement) -> dict[str, Any]:
    fields = {name: getattr(judgement, name) for name in ("kind", "margin", "weight", "dimension", "rater")}
    return {"answers": [*judgement.answers], "values": [*judgement.values], **fields}


def _sides(answers: Sequence[Any], suffix: str = "") -> dict[str, Any]:
    return dict(zip((f"chosen{suffix}", f"rejected{suffix}"), answers, strict=True))


def _write_prompt(prompt: Messages, forms: Forms) -> dict[str, Any]:
    """Return the columns of the prompt: its messages or its text, `system`, and its media."""
    media = media_of(prompt)
    references = {
        f"{kind}s": [medium.reference for medium in media if medium.kind == kind] or None
        for kind in ("image", "video")
    }
    if not prompt:
        return {}
    if not forms.prompts:
        return {"prompt": write_messages([_without_references(message) for message in prompt]), **references}
    system = prompt[0].text if prompt[0].role == "system" and len(prompt) > 1 else None
    return {"prompt": prompt[-1].text, "system": system, **references}


def _without_references(message: Message) -> Message:
    """Return the message with slots for its media, which are in columns of their own."""
    parts = (part if isinstance(part, Text) else replace(part, reference=None) for part in message.content)
    return Message(message.role, tuple(parts))


def _write_answer(answer: Messages, forms: Forms) -> Any:
    return answer[0].text if forms.answers else write_messages(answer)


def _only_medium(answers: Sequence[Messages]) -> str | None:
    """Return the kind of medium that each answer is, one turn of the assistant; None for answers of other kinds."""
    kinds = set()
    for answer in answers:
        alone = answer[0].content[0] if len(answer) == 1 and len(answer[0].content) == 1 else None
        plain = isinstance(alone, Image) or (isinstance(alone, Video) and not alone.options.as_dict())
        kinds.add(alone.kind if alone and plain and answer[0].role == "assistant" else None)
    return kinds.pop() if len(kinds) == 1 else None


def choose_forms(comparisons: Iterable[Comparison]) -> Forms:
    """Return the shortest forms in which all comparisons, each `canonical`, read back as they are."""
    forms = Forms()
    for comparison in comparisons:
        options = starmap(Forms, sorted(product(*({it, False} for it in astuple(forms))), reverse=True))
        fits = (option for option in options if _reads_back(comparison, option))
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
    store = _Store(path, embed, absolute)
    make_folder(path.parent)
    with atomic_write(path) as temporary:
        written = (store.row(write_row(canonical(row), forms), row.id) for row in rows())
        if path.suffix == ".parquet":
            layouts = (store.row(write_row(canonical(row), forms), row.id, empty=True) for row in rows())
            return _write_parquet(written, layouts, temporary, path)
        count = 0
        with open(temporary, "w", encoding="utf-8") as file:
            for row in written:
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


@dataclass(frozen=True)
class _Store:
    """Turns the media references of a row into what a file stores."""

    path: Path
    embed: bool
    absolute: bool

    def row(self, row: dict[str, Any], row_id: str, empty: bool = False) -> dict[str, Any]:
        """Return a row for the file; with `empty`, without the content of its media, to see its types."""
        try:
            return {name: self._value(name, value, empty) for name, value in row.items()}
        except RowError as error:
            raise type(error)(error.reason, row_id) from error

    def _value(self, name: str, value: Any, empty: bool) -> Any:
        if name in ("images", "videos", "response_images", "response_videos"):
            return [self._reference(reference, name.removesuffix("s"), empty) for reference in value]
        if name in ("chosen_image", "rejected_image"):
            return self._reference(value, "image", empty)
        if name in ("prompt", "chosen", "rejected") and not isinstance(value, str):
            return [self._message(message, empty) for message in value]
        if name == "responses" and value and not isinstance(value[0], str):
            return [[self._message(message, empty) for message in answer] for answer in value]
        return value

    def _message(self, message: dict[str, Any], empty: bool) -> dict[str, Any]:
        parts = []
        for part in message["content"]:
            kind = part["type"]
            if part.get(kind) is not None and kind != "text":
                part = {**part, kind: self._reference(part[kind], kind, empty)}
            parts.append({name: value for name, value in part.items() if value is not None})
        return {**message, "content": parts}

    def _reference(self, reference: Any, kind: str, empty: bool) -> Any:
        kind = kind.removeprefix("response_")
        if isinstance(reference, (list, tuple)):  # the frames of a video
            return [self._reference(frame, "image", empty) for frame in reference]
        embedded = not isinstance(reference, (str, os.PathLike))
        if self.path.suffix == ".jsonl":
            return _data_uri(reference, kind) if embedded else self._located(os.fspath(reference))
        if not embedded and not self.embed:
            return {"bytes": None, "path": self._located(os.fspath(reference))}
        name = None if embedded or str(reference).startswith("data:") else os.path.basename(os.fspath(reference))
        return {"bytes": b"" if empty else encoded_media(_encoded(reference), kind), "path": name}

    def _located(self, path: str) -> str:
        if path.startswith(("data:", "http://", "https://")):
            return path
        path, folder = os.path.abspath(path), os.path.abspath(self.path.parent)
        below = path.startswith(folder.rstrip(os.sep) + os.sep)
        return os.path.relpath(path, folder) if below and not self.absolute else path


def _encoded(reference: Any) -> Any:
    return png_of(reference) if isinstance(reference, PIL.Image.Image) else reference


def _data_uri(reference: Any, kind: str) -> str:
    content = encoded_media(_encoded(reference), kind)
    form = (
        "mp4" if kind == "video" else next((it for it, first in FORMATS.items() if content.startswith(first)), "png")
    )
    return f"data:{kind}/{form};base64,{base64.b64encode(content).decode()}"


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
