"""A row of any known layout → a `Comparison`; media or text that would be left out is an error, never dropped."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from vlmrm.data.columns import CRITIQUE, IGNORE, MALFORMED, SPECIAL
from vlmrm.data.media import BASE64_STARTS, IMAGE_SUFFIXES, VIDEO_SUFFIXES, media_key, media_name
from vlmrm.errors import DataError, RowError, UnreadColumnError, or_error
from vlmrm.formats import LAYOUTS, LAYOUTS_TO_SCORE, detect_layout
from vlmrm.formats.layout import MEDIA, Layout, ParsedRow, Row, require_list
from vlmrm.formats.texts import PLACEHOLDERS
from vlmrm.formats.verdicts import VERDICTS, verdicts_on
from vlmrm.outputs import ONE, Outputs
from vlmrm.settings import nearest

Resolve = Callable[[Any], Any]  # turns a media reference of a row into one that can be opened from anywhere
ReadRow = Callable[[Mapping[str, Any], str, Resolve], Comparison]  # a function of a row's cells and its id

JUDGEMENT = tuple(it.name for it in fields(Judgement))


def read_row(
    row: Mapping[str, Any],
    row_id: str,
    resolve: Resolve,
    images: str | None = None,
    outputs: Outputs | None = ONE,
    critiques: bool = False,
) -> Comparison:
    """Return the judgements of a row; `images` refuses one without media (`required`) or with any (`none`).

    Columns called like one of `outputs` hold values of its answers. What trains none of these is refused, unless None.
    With `critiques` the column `critique` is read.
    """
    critique = row.get(CRITIQUE) if critiques else None
    row = {name: value for name, value in row.items() if name != CRITIQUE} if critiques else row
    layouts = LAYOUTS_TO_SCORE if outputs is not None and outputs.named else LAYOUTS
    comparison = _read(row, row_id, resolve, layouts, True, outputs)
    if critique is not None:
        texts = tuple(critique) if isinstance(critique, (list, tuple)) else (critique,)
        if len(texts) != len(comparison.answers) or not all(isinstance(it, str | None) for it in texts):
            count = len(comparison.answers)
            raise RowError(f"`{CRITIQUE}` is no text for each of {count} answers: write a list of them", comparison.id)
        comparison = replace(comparison, critiques=texts)
    media = [medium for talk in comparison.conversations() for medium in media_of(talk.messages)] if images else []
    if images is None or bool(media) == (images == "required"):
        return comparison
    columns = ", ".join(name for name, value in row.items() if value is not None)
    reason = (
        f"it has the {media[0].kind} {media_name(media[0].reference):.80}, and images is none: leave images out of "
        f"the configuration, or remove the row (its columns are {columns})"
        if media
        else "it has no image or video, and images is required: name their column as --columns images=COLUMN (it has "
        f"{columns}), or remove the row"
    )
    raise RowError(reason, comparison.id)


def read_answers(row: Mapping[str, Any], row_id: str, resolve: Resolve) -> Comparison:
    """Return the answers of a row without judgements: there may be a single one, or equal ones."""
    return _read(row, row_id, resolve, LAYOUTS_TO_SCORE, judged=False)


def read_or_error(
    cells: dict[str, Any] | RowError, row_id: str, resolve: Resolve, read: ReadRow = read_row
) -> Comparison | RowError:
    """Return the row's comparison or its error; the collator decides whether an error ends the run."""
    if isinstance(cells, RowError):
        return RowError(cells.reason, row_id)
    return or_error(read, cells, row_id, resolve)


def _read(
    row: Mapping[str, Any],
    row_id: str,
    resolve: Resolve,
    layouts: Sequence[Layout],
    judged: bool,
    outputs: Outputs | None = None,
) -> Comparison:
    if row.get(MALFORMED):
        raise RowError(row[MALFORMED], row_id)
    cells = {name: value for name, value in row.items() if value is not None and name != MALFORMED}
    named = outputs.named & cells.keys() if outputs else frozenset()
    # Words compare two answers, and the layout reads them too. In order: a set of texts has another in each process.
    for name in (one.name for one in outputs or () if one.rates and one.name in named):
        with suppress(ValueError):  # one word in a column of a CSV makes texts of all its numbers
            cells[name] = float(cells[name]) if isinstance(cells[name], str) else cells[name]
    words = sorted(name for name in named if isinstance(cells[name], str))
    rated = {name: cells.pop(name) for name in named.difference(words)}
    row_id = str(cells.get("id", row_id))
    with with_row_id(row_id):
        layout = detect_layout(cells, layouts)
        parsed = layout.read(cells)
        if not judged and not parsed.conversations:
            raise RowError("it has no answer to score")
        prompt = resolve_media(parsed.prompt(), resolve)
        answers = tuple(resolve_media(answer, resolve) for answer in parsed.answers())
        comparison = Comparison(row_id, prompt, answers)
        if judged:
            if parsed.unjudged and not named:
                raise RowError(f"{parsed.unjudged}: remove the row, or leave such rows out with bad_rows: skip")
            judgements = () if parsed.unjudged else _judgements(parsed, cells, len(answers))
            if outputs is not None and named:
                if any(name in VERDICTS for name in words):  # the layout's own verdict is one of them
                    judgements = tuple(it for it in judgements if it.dimension is not None)
                by_name = [
                    *outputs.judgements(rated, len(answers)),
                    *(it for n in words for it in verdicts_on(cells, n)),
                ]
                judgements = _with_named(judgements, by_name, outputs)
            _check_answers(answers, outputs is not None and None in [outputs.targets(it)[1] for it in judgements])
            read = layout.columns() - parsed.figures | SPECIAL
            extra = {name: it for name, it in cells.items() if name not in read and isinstance(it, (str, int, float))}
            category = str(cells["category"]) if "category" in cells else None
            comparison = replace(comparison, judgements=judgements, category=category, columns=extra)
            if not judgements:
                raise RowError("`judgements` is empty: fill it in or remove the row")
            if any(not tie and answers[i] == answers[j] for i, j, tie in comparison.pairs()):
                raise RowError("the same answer is listed twice with different scores: keep one of them")
        _check_no_paths(answers, cells, resolve)
        _check_all_read(cells, layout, parsed, comparison, resolve)
        return comparison


def _with_named(judgements: Sequence[Judgement], by_name: list[Judgement], outputs: Outputs) -> tuple[Judgement, ...]:
    """Return judgements with those of columns named like outputs; one output must not be judged by both."""
    dimensions = {it.dimension for it in by_name}
    others = [it for it in judgements if it.dimension not in dimensions]
    for judgement in others:
        if (name := outputs.names[outputs.index(judgement)]) in dimensions:
            raise RowError(
                f"it judges {name} by the column of this name and once more: name another output for that, or leave "
                f"its column out with --columns {IGNORE}=COLUMN"
            )
    return (*others, *by_name)


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
    if not isinstance(written, Mapping) or not {"answers", "values"} <= written.keys() <= {*JUDGEMENT}:
        raise RowError(f"`judgements` holds {shorten(written)}: write objects with {', '.join(JUDGEMENT)}")
    answers, _ = (require_list(written[name], name) for name in ("answers", "values"))
    if any(isinstance(answer, bool) or not isinstance(answer, int) for answer in answers):
        raise RowError(f"a judgement is of the answers {shorten(answers)}: write their numbers, from 0")
    if written.get("kind", "preference") not in (kinds := ("preference", "rating", "correctness", "progress")):
        raise RowError(f"a judgement is of the kind {written['kind']!r:.40}: write one of {', '.join(kinds)}")
    return Judgement(**{name: value for name, value in written.items() if value is not None})


def _check_answers(answers: Sequence[Messages], compared: bool) -> None:
    if compared and len(answers) < 2:
        raise RowError(f"it has {len(answers)} answer(s): a preference needs two, remove the row")
    for number, answer in enumerate(answers, 1):
        if not any(message.text.strip() or message.media for message in answer):
            raise RowError(f"answer {number} is empty: fill it in or remove the row")
    if compared and all(_trimmed(answer) == _trimmed(answers[0]) for answer in answers[1:]):
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


# Unread columns ------------------------------------------------------------------------------------------------------
# A column that its layout does not read is metadata (a model's name, a rating), unless its values (embedded images,
# data URIs, paths and URLs of images) or its name (`query`, `img`) show media or a part of the conversation.

SIMILARITY = 0.8  # of the name of a column to that of which it may be a typo
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

MEDIA_NAME = re.compile(
    r".*(image|img|picture|photo|screenshot|video)s?(_?(path|file|file_?name|name|url|uri|bytes|b64|base64)s?)?(_?\d+)?",
    re.I,
)
PROMPT_NAME = re.compile(
    r"text|(.*?)(system_?prompt|prompt|question|query|querie|instruction|input|problem|context|history|system|dialog|"
    r"dialogue|conversation|message)s?(_?text)?",
    re.I,
)


def _check_all_read(row: Row, layout: Layout, parsed: ParsedRow, comparison: Comparison, resolve: Resolve) -> None:
    """Check that no media and no part of the conversation in a row is left out."""
    comparison.conversations()  # raises for empty slots
    columns = layout.columns() | SPECIAL
    unread = [(name, value) for name, value in row.items() if name not in columns or name in parsed.skipped]
    unread += parsed.unread.items()
    absent = columns.difference(row)
    messages = [message for part in (comparison.prompt, *comparison.answers) for message in part] if unread else []
    for name, value in unread:
        free = absent if name in row else frozenset()  # what --columns can read it as
        leave = f"leave it out with --columns {IGNORE}={name}" if name in row else "remove it"
        if (medium := _unread_medium(name, value, messages, resolve)) is not None:
            kind = "video" if _is_video(name, medium) else "image"
            read = next((f"read it with --columns {it}={name}" for it in (f"{kind}s", kind) if it in free), None)
            raise UnreadColumnError(
                f"the column `{name}` holds an image or video ({media_name(medium):.80}) that is not read: "
                f"{f'{read} if it belongs to the prompt, or ' if read else ''}{leave} if it is not part of the "
                "conversation"
            )
        text = _unread_text(name, value, messages)
        if text is not None and name in ANSWERS:
            raise UnreadColumnError(
                f"the column `{name}` holds a text ({shorten(text)}) that is not read: write both as messages if it "
                f"is a part of the answer, or {leave}"
            )
        if text is not None:
            meant = "system" if "system" in name.lower() else "prompt"
            can_be_read = meant in free and (meant == "system" or not any(it in row for it in PROMPTS))
            read = f"read it with --columns {meant}={name}" if can_be_read else "join it to the prompt"
            raise UnreadColumnError(
                f"the column `{name}` holds a text ({shorten(text)}) that is not read: {read}, or {leave} if it is "
                "not part of the conversation"
            )
        near = _typo_of(name, (layout.required | layout.optional | SPECIAL) & absent)
        # A number is no typo of a prompt.
        if near and not (isinstance(value, (int, float)) and (PROMPT_NAME.fullmatch(near) or near in MEDIA)):
            raise UnreadColumnError(
                f"the column `{name}` is not read: read it as `{near}` with --columns {near}={name}, or {leave}"
            )


def _is_video(name: str, medium: Any) -> bool:
    if isinstance(medium, str):
        return medium.startswith("data:video/") or medium.lower().endswith(VIDEO_SUFFIXES)
    return "video" in name.lower()


@lru_cache(maxsize=1024)
def _typo_of(name: str, absent: frozenset[str]) -> str | None:
    """Return the column of which a name is a typo; `question_id` is not one of `question`."""
    near = nearest(name, absent, SIMILARITY)
    return near if near and near not in name.lower() else None


def _unread_medium(name: str, value: Any, messages: Sequence[Message], resolve: Resolve) -> Any | None:
    media = list(_media_in(value)) or (list(_texts(value)) if MEDIA_NAME.fullmatch(name) else [])
    read = [medium.reference for medium in media_of(messages)] if media else []
    if not read:
        return media[0] if media else None
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


def _unread_text(name: str, value: Any, messages: Sequence[Message]) -> str | None:
    """Return the first text that is not in the conversations, of a column of answers or one named like a prompt."""
    named = PROMPT_NAME.fullmatch(name)
    # Beside a prompt that is read, a longer name such as `generation_prompt` is probably metadata.
    has_prompt = any(message.text.strip() for message in messages if message.role == "user")
    if name not in ANSWERS and (named is None or (has_prompt and (named[1] or named[3]))):
        return None
    read = text_of(messages)
    pieces = (piece.strip() for text in _texts(value) for piece in PLACEHOLDER.split(text))
    unread = (piece for piece in pieces if piece not in read)
    # A path of an answer is not a text, and `_unread_medium` has checked its image.
    return next((piece for piece in unread if name not in ANSWERS or not any(_media_in(piece))), None)


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
