"""A row of any known layout → a `Comparison`; media or text that would be left out is an error, never dropped."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from PIL import Image

from vlmrm.conversation import (
    Comparison,
    Judgement,
    Message,
    Messages,
    Part,
    Text,
    media_of,
    shorten,
    text_of,
    with_article,
)
from vlmrm.data.columns import IGNORE, MALFORMED, SPECIAL
from vlmrm.data.media import BASE64_STARTS, IMAGE_SUFFIXES, VIDEO_SUFFIXES, media_key, media_name
from vlmrm.errors import DataError, RowError, UnreadColumnError
from vlmrm.formats import LAYOUTS_TO_SCORE, detect_layout
from vlmrm.formats.layout import Layout, ParsedRow, Row, require_list
from vlmrm.formats.texts import PLACEHOLDERS
from vlmrm.settings import nearest

Resolve = Callable[[Any], Any]  # turns a media reference of a row into one that can be opened from anywhere
ReadRow = Callable[[Mapping[str, Any], str, Resolve], Comparison]  # a function of a row's cells and its id


JUDGEMENT = tuple(it.name for it in fields(Judgement))


def read_row(row: Mapping[str, Any], row_id: str, resolve: Resolve) -> Comparison:
    """Return the preferences of a row."""
    cells, row_id = _cells_and_id(row, row_id)
    with with_row_id(row_id):
        layout = detect_layout(cells)
        parsed = layout.read(cells)
        if parsed.unjudged:
            raise RowError(f"{parsed.unjudged}: remove the row, or leave such rows out with bad_rows: skip")
        answers = [resolve_media(answer, resolve) for answer in parsed.answers()]
        judgements = _judgements(parsed, cells, len(answers))
        _check_answers(answers)
        _check_no_paths(answers, cells, resolve)
        read = layout.columns() - parsed.figures | SPECIAL
        extra = {name: value for name, value in cells.items() if name not in read}
        category = cells.get("category")
        comparison = Comparison(
            id=row_id,
            prompt=resolve_media(parsed.prompt(), resolve),
            answers=tuple(answers),
            judgements=judgements,
            category=None if category is None else str(category),
            columns={name: value for name, value in extra.items() if isinstance(value, (str, int, float, bool))},
        )
        _check_judgements(comparison)
        _check_all_read(cells, layout, parsed, comparison, resolve)
        return comparison


def read_answers(row: Mapping[str, Any], row_id: str, resolve: Resolve) -> Comparison:
    """Return the answers of a row without judgements: there may be a single one, or equal ones."""
    cells, row_id = _cells_and_id(row, row_id)
    with with_row_id(row_id):
        layout = detect_layout(cells, LAYOUTS_TO_SCORE)
        parsed = layout.read(cells)
        if not parsed.conversations:
            raise RowError("it has no answer to score")
        answers = tuple(resolve_media(answer, resolve) for answer in parsed.answers())
        _check_no_paths(answers, cells, resolve)
        comparison = Comparison(row_id, resolve_media(parsed.prompt(), resolve), answers)
        _check_all_read(cells, layout, parsed, comparison, resolve)
        return comparison


def _cells_and_id(row: Mapping[str, Any], row_id: str) -> tuple[dict[str, Any], str]:
    """Return the non-empty cells of a row, and its `id` if it has that column."""
    if row.get(MALFORMED):
        raise RowError(row[MALFORMED], row_id)
    cells = {name: value for name, value in row.items() if value is not None and name != MALFORMED}
    return cells, str(cells.get("id", row_id))


@contextmanager
def with_row_id(row_id: str) -> Generator[None]:
    """Turn every DataError raised inside into a RowError that names the row."""
    try:
        yield
    except RowError as error:
        raise type(error)(error.reason, row_id) from error
    except DataError as error:
        raise RowError(str(error), row_id) from error


def resolve_media(messages: Sequence[Message], resolve: Resolve) -> Messages:
    """Return the messages with each media reference resolved."""

    def resolved(part: Part) -> Part:
        return part if isinstance(part, Text) else replace(part, reference=resolve(part.reference))

    return tuple(Message(message.role, tuple(map(resolved, message.content))) for message in messages)


def _judgements(parsed: ParsedRow, cells: Mapping[str, Any], count: int) -> tuple[Judgement, ...]:
    """Return the row's judgements of its answers: one, or those of several raters; of a tie all values are equal."""
    if "judgements" in cells:
        return tuple(_read_judgement(item) for item in require_list(cells["judgements"], "judgements"))
    tie = cells.get("tie", False)
    if tie not in (False, True):
        raise RowError(f"`tie` is {tie!r}: write true or false")
    of_row = Judgement(
        tuple(range(count)),
        (1.0,) * count if tie else tuple(parsed.values),
        parsed.kind,
        margin=cells.get("margin"),
        weight=cells.get("weight", 1.0),
    )
    if tie or not parsed.judgements:
        return (of_row,)
    return tuple(replace(it, margin=of_row.margin, weight=it.weight * of_row.weight) for it in parsed.judgements)


def _read_judgement(written: Any) -> Judgement:
    """Return one of the `judgements` of a canonical row, which name the answers, their values, and whose they are."""
    if not isinstance(written, Mapping) or not {"answers", "values"} <= written.keys():
        raise RowError(f"`judgements` holds {shorten(written)}: write objects with `answers` and `values`")
    if unknown := sorted(written.keys() - set(JUDGEMENT)):
        raise RowError(f"a judgement has `{unknown[0]}`, which is not read: its fields are {', '.join(JUDGEMENT)}")
    answers, _ = (require_list(written[name], name) for name in ("answers", "values"))
    if any(isinstance(answer, bool) or not isinstance(answer, int) for answer in answers):
        raise RowError(f"a judgement is of the answers {shorten(answers)}: write their numbers, from 0")
    if written.get("kind", "preference") not in ("preference", "rating"):
        raise RowError(f"a judgement is of the kind {written['kind']!r:.40}: write preference or rating")
    return Judgement(**{name: value for name, value in written.items() if value is not None})


def _check_answers(answers: Sequence[Messages]) -> None:
    if len(answers) < 2:
        raise RowError(f"it has {len(answers)} answer(s): a preference needs two, remove the row")
    for number, answer in enumerate(answers, 1):
        if not any(message.text.strip() or message.media for message in answer):
            raise RowError(f"answer {number} is empty: fill it in or remove the row")
    if all(_trimmed(answer) == _trimmed(answers[0]) for answer in answers[1:]):
        raise RowError("the answers are the same, so nothing can be preferred: remove the row")


def _trimmed(answer: Messages) -> list[Any]:
    """Return the role and parts of each message, texts without spaces around them, which chat templates remove."""
    parts = [[part.text.strip() if isinstance(part, Text) else part for part in message.content] for message in answer]
    return [(message.role, of_message) for message, of_message in zip(answer, parts, strict=True)]


def _check_no_paths(answers: Sequence[Messages], row: Row, resolve: Resolve) -> None:
    """Refuse answers that are paths of images or videos, which would be read as these words.

    A file name may be an answer, so that a path must exist, or all answers have folders.
    """
    paths = {
        number: text
        for number, answer in enumerate(answers, 1)
        if not media_of(answer) and any(_media_in(text := text_of(answer).strip()))
    }
    in_folders = len(paths) == len(answers) and all("/" in path and " " not in path for path in paths.values())
    for number, path in paths.items():
        if not (in_folders or path.startswith(EMBEDDED) or _is_file(path, resolve)):
            continue
        kind = "video" if _is_video("", path) else "image"
        column = next((name for name in ANSWER_LISTS if name in row), None)
        mapping = f"response_{kind}s={column}" if column else "chosen_image=chosen rejected_image=rejected"
        known = column or (kind == "image" and "chosen" in row)
        advice = f"read it with --columns {mapping}, or " if known else ""
        raise RowError(
            f"answer {number} is the path of {with_article(kind)} ({path:.80}), which would be read as these words: "
            f"{advice}write messages with {with_article(kind)} part"
        )


def _is_file(path: str, resolve: Resolve) -> bool:
    try:
        return os.path.isfile(resolve(path))
    except RowError:  # outside image_root
        return False


def _check_judgements(comparison: Comparison) -> None:
    if not comparison.judgements:
        raise RowError("`judgements` is empty: fill it in or remove the row")
    if any(len(judgement.answers) < 2 for judgement in comparison.judgements):
        raise RowError("it has a judgement of one answer: a preference needs two, remove it")
    if any(not tie and comparison.answers[i] == comparison.answers[j] for i, j, tie in comparison.pairs()):
        raise RowError("the same answer is listed twice with different scores: keep one of them")


# Unread columns ------------------------------------------------------------------------------------------------------
# A column that its layout does not read is metadata (a model's name, a rating), unless its values (embedded images,
# data URIs, paths and URLs of images) or its name (`query`, `img`) show media or a part of the conversation.

TYPO_LENGTH, TYPO_SIMILARITY = 3, 0.8  # a longer name, this similar to that of a column, may be a typo of it
LONG = 200  # characters of a text that is more than a label
MAX_ITEMS = 100  # of a list that are examined: embeddings have thousands

SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
# The first bytes of images and videos, enough of each not to match hashes or audio.
SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM....\0\0\0\0|II\*\0|MM\0\*|RIFF....(WEBP|AVI )|\x1aE\xdf\xa3|....ftyp", re.DOTALL
)
EMBEDDED = ("data:image/", "data:video/", *BASE64_STARTS)

PLACEHOLDER = re.compile("|".join(PLACEHOLDERS.values()))

ANSWERS = frozenset({"chosen", "rejected", "responses"})  # columns of answers
ANSWER_LISTS = ("responses", "completions", "answers", "candidates")
PROMPTS = ("prompt", "question", "messages", "conversations", "instruction", "caption")  # columns of prompts

# Words in names of columns, in the singular.
MEDIA_WORDS = frozenset(["image", "img", "picture", "pic", "photo", "screenshot", "video"])
FILE_WORDS = frozenset(["path", "file", "filename", "name", "url", "uri", "byte", "base", "b"])  # base64, b64
PROMPT_WORDS = frozenset(
    [
        *("prompt", "question", "query", "querie", "instruction", "input", "problem", "context", "history", "system"),
        *("dialog", "dialogue", "conversation", "message"),
    ]
)


def _check_all_read(row: Row, layout: Layout, parsed: ParsedRow, comparison: Comparison, resolve: Resolve) -> None:
    """Check that no media and no part of the conversation in a row is left out."""
    comparison.conversations()  # raises for empty slots
    columns = layout.columns() | SPECIAL
    unread = [(name, value) for name, value in row.items() if name not in columns or name in parsed.skipped]
    unread += parsed.unread.items()
    readable = (layout.required | layout.optional | SPECIAL).difference(row)
    messages = [message for part in (comparison.prompt, *comparison.answers) for message in part] if unread else []
    for name, value in unread:
        free = columns.difference(row) if name in row else frozenset()  # what --columns can read it as
        if (medium := _unread_medium(name, value, messages, resolve)) is not None:
            kind = "video" if _is_video(name, medium) else "image"
            mapping = _mapping(name, [f"{kind}s", kind], free, " if it belongs to the prompt, or ")
            raise UnreadColumnError(
                f"the column `{name}` holds an image or video ({media_name(medium):.80}) that is not read: {mapping}"
                f"{_ignoring(name, row)} if it is not part of the conversation"
            )
        if (text := _unread_answer(name, value, messages)) is not None:
            raise UnreadColumnError(
                f"the column `{name}` holds a text ({shorten(text)}) that is not read: write both as messages if it "
                f"is a part of the answer, or {_ignoring(name, row)}"
            )
        if (text := _unread_text(name, value, messages)) is not None:
            readable_as = (
                ["system"] if "system" in _words(name) else [] if any(it in row for it in PROMPTS) else ["prompt"]
            )
            mapping = _mapping(name, readable_as, free, ", or ") or "join it to the prompt, or "
            raise UnreadColumnError(
                f"the column `{name}` holds a text ({shorten(text)}) that is not read: {mapping}"
                f"{_ignoring(name, row)} if it is not part of the conversation"
            )
        if (near := _typo_of(name, readable)) and not (isinstance(value, (int, float)) and _is_of_prompt(near)):
            raise UnreadColumnError(
                f"the column `{name}` is not read: read it as `{near}` with --columns {near}={name}, or "
                f"{_ignoring(name, row)}"
            )


def _mapping(name: str, readable_as: Sequence[str], free: frozenset[str], end: str) -> str:
    """Return the words that read a column as the first of `readable_as` that is free; nothing where none is."""
    column = next((column for column in readable_as if column in free), None)
    return f"read it with --columns {column}={name}{end}" if column else ""


def _ignoring(name: str, row: Row) -> str:
    """Return the words that say how a column, or a field inside of one, is left out."""
    return f"leave it out with --columns {IGNORE}={name}" if name in row else "remove it"


def _is_video(name: str, medium: Any) -> bool:
    if isinstance(medium, str):
        return medium.startswith("data:video/") or medium.lower().endswith(VIDEO_SUFFIXES)
    return "video" in _words(name)


@lru_cache(maxsize=1024)
def _typo_of(name: str, absent: frozenset[str]) -> str | None:
    """Return the column of which a name is a typo; `question_id` is not one of `question`."""
    near = nearest(name, absent, TYPO_SIMILARITY) if len(name) > TYPO_LENGTH else None
    return near if near and near not in name.lower() else None


def is_noteworthy(value: Any) -> bool:
    """Return whether a report should name an unread column with this value: a long text, or possibly media."""
    return any(len(text) > LONG for text in _texts(value)) or any(True for _ in _media_in(value))


def _unread_medium(name: str, value: Any, messages: Sequence[Message], resolve: Resolve) -> Any | None:
    media = list(_media_in(value)) or (list(_texts(value)) if _is_named_media(name) else [])
    if not media:
        return None
    read = [medium.reference for medium in media_of(messages)]
    if not read:
        return media[0]
    # Beside an image that is read, a path is probably its origin, unless a different image exists there.
    sources = {os.path.basename(reference) for reference in read if isinstance(reference, str)}
    keys = set(map(media_key, read))
    for medium in media:
        if isinstance(medium, str) and not medium.startswith(EMBEDDED):
            if _is_file(medium, resolve) and os.path.basename(medium) not in sources:
                return medium
        elif media_key(medium) not in keys:
            return medium
    return None


def _media_in(value: Any) -> Iterator[Any]:
    """Yield the references to images and videos in a cell."""
    if isinstance(value, str):
        if value.startswith(EMBEDDED) or (value.lower().endswith(SUFFIXES) and "\n" not in value):
            yield value
    elif isinstance(value, (bytes, bytearray, memoryview)):
        if SIGNATURE.match(bytes(value[:12])):
            yield value
    elif isinstance(value, Image.Image):
        yield value
    else:
        for inner in _inside(value):
            yield from _media_in(inner)


def _is_named_media(name: str) -> bool:
    words = _words(name)
    return words[-1] in MEDIA_WORDS or (words[-1] in FILE_WORDS and not MEDIA_WORDS.isdisjoint(words))


def _is_named_prompt(name: str) -> bool:
    words = _words(name)
    return words[-1] in PROMPT_WORDS or (words[-1] == "text" and (len(words) == 1 or words[-2] in PROMPT_WORDS))


def _is_of_prompt(name: str) -> bool:
    return _is_named_prompt(name) or _is_named_media(name)


def _unread_text(name: str, value: Any, messages: Sequence[Message]) -> str | None:
    if not _is_named_prompt(name):
        return None
    has_prompt = any(message.text.strip() for message in messages if message.role == "user")
    # Beside a prompt that is read, a longer name such as `generation_prompt` is probably metadata.
    if has_prompt and len(words := _words(name)) > 1 and words != ["system", "prompt"]:
        return None
    return next(_unread_pieces(value, messages), None)


def _unread_answer(name: str, value: Any, messages: Sequence[Message]) -> str | None:
    if name not in ANSWERS:
        return None
    # A path is not a text, and `_unread_medium` has checked its image.
    return next((piece for piece in _unread_pieces(value, messages) if not any(_media_in(piece))), None)


def _unread_pieces(value: Any, messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of a cell that are not in the conversations."""
    read = text_of(messages)
    pieces = (piece.strip() for text in _texts(value) for piece in PLACEHOLDER.split(text))
    return (piece for piece in pieces if piece not in read)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a cell, those of messages included."""
    if isinstance(value, str):
        if value.strip():
            yield value
        return
    for inner in _inside(value):
        yield from _texts(inner)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        return (inner for key, inner in value.items() if key not in ("role", "from", "type"))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return islice(value, MAX_ITEMS)
    return iter(())


@lru_cache(maxsize=1024)
def _words(name: str) -> list[str]:
    """Return the words of a column's name, in the singular: `imageURLs_2` → image, url."""
    words = re.findall(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+", name)
    return [word.lower().removesuffix("s") for word in words] or [name]
