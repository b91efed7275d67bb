"""Names of columns: the mapping `columns` of the names in docs/data.md, and the file names of a hub image folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from vlmrm.errors import ConfigError, DataError
from vlmrm.formats import LAYOUTS_TO_SCORE
from vlmrm.settings import did_you_mean

# The only column of a line that could not be parsed, with the reason; empty in the rows of its table that could.
MALFORMED = "$malformed"
SPECIAL = frozenset({"id", "margin", "weight", "tie", "category", "judgements"})  # read in every layout
CRITIQUE = "critique"  # a text about each answer, read where the training learns them
WRITE = "write columns as images=file_name prompt=query"
IGNORE = "ignore"  # the name of columns that are not read at all


def read_columns() -> frozenset[str]:
    """Return the columns that some layout reads."""
    return SPECIAL.union(*(layout.columns() for layout in LAYOUTS_TO_SCORE))


Columns: TypeAlias = dict[str, str | list[str]]

# What `datasets` reads as the files of a folder: `file_name` is the image of a row, `chosen_image_file_name` that of
# the column `chosen_image`.
METADATA = "metadata"
FILE_NAME = re.compile(r"(?:(?P<column>.+)_)?file_names?")


def parse_columns(value: Any, outputs: Collection[str] = ()) -> Columns | None:
    """Return a mapping of our names of columns, those of docs/data.md and of outputs, to those of the data.

    The name `ignore` has a list of columns.
    """
    if value is None:
        return None
    known = read_columns().union(outputs)
    columns: Columns = {}
    ignored: list[str] = []
    for name, column in _flat(_named("columns", value)):
        if not isinstance(column, str) or not column or not isinstance(name, str):
            raise ConfigError(f"columns holds {name}: {column!r}, which names no column: {WRITE}.")
        if name not in known and name != IGNORE:
            if column in known or column == IGNORE:
                raise ConfigError(
                    f"columns holds {name}={column}: write {column}={name}, the name of docs/data.md first."
                )
            near = did_you_mean(name, sorted(known), ": write NAME=COLUMN, with a name of docs/data.md or of outputs.")
            raise ConfigError(f"columns reads {column} as {name}, which no layout has{near}")
        if name in columns:
            raise ConfigError(f"columns names {name} twice ({columns[name]} and {column}): keep one.")
        if column in columns.values() or column in ignored:
            raise ConfigError(f"columns reads {column} twice: keep one of the two.")
        if name == IGNORE:
            ignored.append(column)
        else:
            columns[name] = column
    return {**columns, IGNORE: ignored} if ignored else columns


def _flat(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of a mapping, one for each column that is ignored."""
    for name, value in pairs:
        columns = value if name == IGNORE and isinstance(value, (list, tuple)) else [value]
        yield from ((name, column) for column in columns)


def parse_names(key: str, value: Any) -> dict[str, Any] | None:
    """Return a key that is a mapping: the text or list of a command line holds `NAME=VALUE`."""
    if value is None:
        return None
    pairs = [*_named(key, value)]
    if len(mapping := dict(pairs)) < len(pairs):
        raise ConfigError(f"{key} names one thing twice: keep one.")
    return mapping


def _named(key: str, value: Any) -> Iterable[tuple[Any, Any]]:
    words = [value] if isinstance(value, str) else value
    return words.items() if isinstance(words, Mapping) else [_pair(key, word) for word in words]


def _pair(key: str, word: Any) -> tuple[str, str]:
    name, separator, value = str(word).partition("=")
    if not separator:
        raise ConfigError(f"{key} holds {word!r}: {WRITE if key == 'columns' else f'write NAME=VALUE in {key}'}.")
    return name.strip(), value.strip()


def choose_names(path: str, present: Collection[str], columns: Mapping[str, str | list[str]]) -> dict[str, str]:
    """Return the new name of each column of the table at `path` that gets one, `IGNORE` of one that is not read.

    Columns that `columns` does not map keep their names, but for the file names of a hub image folder.
    """
    names = {column: name for name, column in _flat(columns.items()) if column in present}
    for column, name in names.items():
        if name != IGNORE and name in present and name not in names:
            raise DataError(
                f"{path} has a column `{name}` of its own beside `{column}`: take {name}={column} out of columns, or "
                f"remove one of the two columns"
            )
    if Path(path).name.partition(".")[0] == METADATA:
        read = read_columns()
        for column in present:
            match = FILE_NAME.fullmatch(column)
            name = (match["column"] or "images") if match else ""
            if name in read and column not in names and name not in names.values() and name not in present:
                names[column] = name
    return names


def check_columns_exist(tables: Mapping[str, Collection[str]], columns: Mapping[str, str | list[str]]) -> None:
    """Check that each mapped column is in a table, under either name; one with the new name needs no mapping."""
    present = {name for names in tables.values() for name in names}
    for name, column in _flat(columns.items()):
        if column not in present and (name == IGNORE or name not in present):
            where = ", ".join(list(tables)[:3])
            near = did_you_mean(column, present, f": the columns are {', '.join(sorted(present))}.").rstrip(".")
            raise DataError(f"columns says {name}={column}, and {where} has no column `{column}`{near}")


def renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a row under the new names of its columns; with a value under both names it is a malformed row."""
    row = {column: value for column, value in row.items() if names.get(column) != IGNORE}
    for column, name in names.items():
        if row.get(column) is not None and row.get(name) is not None and name not in names:
            return {MALFORMED: f"it has both `{column}` and `{name}`, which columns makes one: remove one of them"}
    kept = {name: value for name, value in row.items() if name in names or name not in names.values()}
    return {names.get(name, name): value for name, value in kept.items()}
