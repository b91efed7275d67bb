"""Define a layout of rows, and the helpers that readers of rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from vlmrm.conversation import Image, Judgement, Message, Messages, Video
from vlmrm.errors import RowError
from vlmrm.formats.openai import read_reference
from vlmrm.formats.texts import fill, read_prompt

Row: TypeAlias = Mapping[str, Any]  # without its empty cells: a table fills missing columns with None

Kind: TypeAlias = Literal["preference", "rating", "correctness", "progress"]

CHOSEN, REJECTED = 1.0, 0.0
MEDIA = frozenset({"image", "images", "video", "videos"})


@dataclass(frozen=True)
class ParsedRow:
    """Hold a row as conversations with a value each; their first `shared` messages are the prompt."""

    conversations: Sequence[Messages]
    values: Sequence[float]
    shared: int
    kind: Kind = "preference"
    skipped: frozenset[str] = frozenset()  # columns of the layout that were not read in this row
    unread: Mapping[str, Any] = field(default_factory=dict)  # fields inside of its columns that were not
    figures: frozenset[str] = frozenset()  # columns that are read, and stay with the comparison
    judgements: tuple[Judgement, ...] = ()  # of several raters or criteria; `values` is their mean
    unjudged: str = ""  # why the values mean nothing: it is no preference, but its answers can be scored

    def prompt(self) -> Messages:
        return self.conversations[0][: self.shared] if self.conversations else ()

    def answers(self) -> tuple[Messages, ...]:
        return tuple(conversation[self.shared :] for conversation in self.conversations)


Alternatives: TypeAlias = tuple[frozenset[str], ...]  # sets of columns; a row must have one set


@dataclass(frozen=True)
class Layout:
    """Read rows of one source format: all `required` columns, one alternative of each group, none of `without`.

    Columns outside `required`, `groups` and `optional` are not read; scalar ones are kept with the comparison.
    """

    name: str
    read: Callable[[Row], ParsedRow]
    required: frozenset[str]
    groups: tuple[Alternatives, ...] = ()
    optional: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def matches(self, columns: frozenset[str]) -> bool:
        complete = all(any(names <= columns for names in group) for group in self.groups)
        return complete and self.required <= columns and not self.without & columns

    def columns(self) -> frozenset[str]:
        return self.required.union(self.optional, *(names for group in self.groups for names in group))

    def needed(self, columns: frozenset[str]) -> frozenset[str]:
        """Return the columns to have: the required ones, and of each group the alternative nearest to `columns`."""
        nearest = (max(group, key=lambda names: len(names & columns) / len(names)) for group in self.groups)
        return self.required.union(*nearest)

    def missing(self, columns: frozenset[str]) -> str:
        """Return the needed columns that `columns` lacks, in words."""
        missing = [f"`{name}`" for name in sorted(self.required - columns)]
        for group in self.groups:
            if not any(names <= columns for names in group):
                begun = [names for names in group if names & columns] or group
                words = [" and ".join(f"`{name}`" for name in sorted(names - columns)) for names in begun]
                missing.append(" or ".join([*words[:MAX_LISTED], *(["..."] if len(words) > MAX_LISTED else [])]))
        return " and ".join(missing)


MAX_LISTED = 4  # alternatives that an error lists


def layout(
    name: str,
    required: Iterable[str] = (),
    *,
    one_of: Iterable[str] = (),
    any_of: Iterable[Sequence[tuple[str, ...]]] = (),
    optional: Iterable[str] = (),
    without: Iterable[str] = (),
) -> Callable[[Callable[[Row], ParsedRow]], Layout]:
    """Make a reader of rows a Layout; `one_of` is a group of single columns, `any_of` are groups of several."""
    groups = [tuple(map(frozenset, group)) for group in any_of]
    if singles := sorted(one_of):
        groups.append(tuple(frozenset([column]) for column in singles))
    return lambda read: Layout(name, read, frozenset(required), tuple(groups), frozenset(optional), frozenset(without))


def with_media(row: Row, conversation: Sequence[Message]) -> Messages:
    """Return the conversation with the row's images and videos filled in."""
    return fill(conversation, media_in(row, "image"), media_in(row, "video"))


def media_in(row: Row, kind: str, prefix: str = "") -> list[Any]:
    """Return the media of the row's `images` and `image` columns (for kind `image`), in this order."""
    media: list[Any] = []
    for name in (f"{prefix}{kind}s", f"{prefix}{kind}"):
        media += as_list(row.get(name))
    return media


def as_list(media: Any) -> list[Any]:
    """Return a column's media as a list; the column holds one, a list of them, or None."""
    if media is None:
        return []
    several = isinstance(media, (list, tuple)) or getattr(media, "ndim", None) == 1  # an array of paths
    return list(media) if several else [media]


def prompt_turns(row: Row, prompt: Any) -> Messages:
    """Return the messages before the answer: the row's `system` text, then the prompt.

    A row with media but no prompt gets an empty user turn for them; a row with neither has no prompt.
    """
    system = (Message.of("system", row["system"]),) if row.get("system") else ()
    if prompt not in (None, "", []):
        return (*system, *read_prompt(prompt))
    if any(row.get(name) for name in MEDIA):
        return (*system, Message("user", ()))  # `fill` puts the media there
    return system


def question_turns(row: Row, prompt: Any) -> Messages:
    """Return `prompt_turns`, and refuse an answer at their end: the row's answers are in other columns."""
    turns = prompt_turns(row, prompt)
    if turns and turns[-1].role == "assistant":
        raise RowError("its prompt ends with an answer of the assistant, before those of the row: leave it out")
    return turns


def image_turn(reference: Any) -> Message:
    """Return an assistant message of an image, the answer in text-to-image data."""
    return Message.of("assistant", Image(read_reference(reference)))


def video_turn(reference: Any) -> Message:
    """Return an assistant message of a video, the answer in text-to-video data."""
    return Message.of("assistant", Video(read_reference(reference)))


def first_of(row: Row, names: Iterable[str]) -> str | None:
    """Return the first of the columns that a row has."""
    return next((name for name in names if name in row), None)


def records(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects; Hugging Face's sequences of structs are stored as an object of lists."""
    if isinstance(value, Mapping):
        lengths = {len(column) for column in value.values() if isinstance(column, (list, tuple))}
        if len(lengths) == 1:
            return [{key: _item(column, i) for key, column in value.items()} for i in range(lengths.pop())]
    if isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
        return [dict(item) for item in value]
    raise RowError(f"`{name}` must be a list of objects")


def _item(column: Any, index: int) -> Any:
    if isinstance(column, Mapping):
        return {key: _item(inner, index) for key, inner in column.items()}
    return column[index] if isinstance(column, (list, tuple)) else column


def common_turns(first: Messages, second: Messages) -> int:
    """Return the number of leading messages that both share; 0 if no user turn is among them."""
    count = 0
    # The last message of each is its answer, even if both are equal.
    while count < min(len(first), len(second)) - 1 and first[count] == second[count]:
        count += 1
    return count if any(message.role == "user" for message in first[:count]) else 0


def require_numbers(value: Any, name: str, count: int) -> list[float]:
    """Return a column's list of `count` scores or ranks; raise RowError for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        length = len(value) if isinstance(value, (list, tuple)) else "no list"
        raise RowError(f"`{name}` must hold one number for each of the {count} answers, and holds {length}")
    for number in value:
        # A bool is an int to Python, but no score: a column of booleans is probably another one.
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise RowError(f"`{name}` holds {number!r}: write a number")
    return [float(number) for number in value]


def require_list(value: Any, name: str) -> list[Any]:
    """Return a column's list; raise RowError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise RowError(f"`{name}` must be a list, got {type(value).__name__}")
    return list(value)
