"""Tables of rows: hub data sets, `save_to_disk` folders and data files, opened without reading, columns renamed.

Images inside tables stay encoded bytes; nothing here decodes, maps or copies them.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrm.data.columns import MALFORMED, Columns, check_columns_exist, choose_names, renamed
from vlmrm.data.kinds import KIND_NAMES, KINDS, first_non_utf8, kind_of, open_file, unreadable
from vlmrm.errors import DataError, RowError
from vlmrm.files import visible_files
from vlmrm.formats import LAYOUTS, detect_layout
from vlmrm.formats.layout import Layout
from vlmrm.libraries import hub_answers
from vlmrm.settings import nearest_file

if TYPE_CHECKING:
    from datasets import Dataset

FIRST_ROWS = 20  # checked when a table is opened
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """A table of rows. `name` begins its row ids; relative media paths start from `folder`.

    `names` has the new name of each renamed column, `IGNORE` of one that is not read.
    """

    name: str
    table: Dataset
    folder: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path for messages: the file's, or `name` for a table without a file."""
        path = os.path.join(self.folder, self.name)
        return path if os.path.exists(path) else self.name

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        columns = [name for name in self.table.column_names or () if name != MALFORMED]
        return list(renamed(dict.fromkeys(columns), self.names))

    def rows(self, batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Return the rows of a batch of the table's columns, under their new names."""
        count = len(next(iter(batch.values()), ()))
        rows = [{name: column[i] for name, column in batch.items()} for i in range(count)]
        return [renamed(row, self.names) for row in rows] if self.names else rows


class InMemory(str):
    """A data set in memory, where a path may stand; as text it is its name in messages, row ids and settings."""

    table: Dataset

    @classmethod
    def of(cls, table: Any, name: str) -> InMemory:
        """Return `table` under a name."""
        from datasets import Dataset

        if isinstance(table, dict):
            raise DataError(f"{name} has the splits {', '.join(map(str, table))}: pass one of them")
        if not isinstance(table, Dataset):
            raise DataError(f"{name} is a {type(table).__name__}: pass a Dataset of `datasets`, loaded whole")
        if table.format["type"] == "custom":
            raise DataError(f"{name} has a transform, which is not read: apply it with map, or remove it")
        result = cls(name)
        result.table = _undecoded(table.with_format(None))
        return result

    def __deepcopy__(self, memo: Any) -> InMemory:
        return self


def name_tables(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which data sets in memory have the names of the keys that hold them."""

    def named(key: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [named(key, item) for item in value]
        return InMemory.of(value, key) if hasattr(value, "column_names") else value

    return {key: named(key, value) for key, value in keys.items()}


def load_sources(
    paths: Sequence[str],
    split: str = "train",
    bad_rows: str = "error",
    columns: Columns | None = None,
    layouts: Sequence[Layout] = LAYOUTS,
) -> list[list[Source]]:
    """Open each of `paths`: a hub id, a `save_to_disk` folder, a data file, a folder of them, or a glob pattern.

    `split` selects a split of a hub data set or folder, and does not apply to files and patterns. Each file is a
    source of its own, so that a row can be named by its file and number. With `bad_rows` "skip", invalid lines of a
    jsonl file become rows with the reason in the column `MALFORMED`. `columns` maps our names to those of the tables,
    and applies to each table that has them.
    """
    groups = [open_tables(path, split, bad_rows=bad_rows) for path in paths]
    present = {source.path: columns_of(source) for group in groups for source in group}
    check_columns_exist(present, columns or {})
    opened: list[list[Source]] = []
    for group in groups:
        opened.append([])
        for source in group:
            names = choose_names(source.path, present[source.path], columns or {})
            try:
                detect_layout(renamed(dict.fromkeys(present[source.path]), names), layouts)
            except DataError as error:
                raise DataError(f"{source.name}: {error}") from error
            opened[-1].append(replace(source, names=names))
    return opened


def open_tables(path: str, split: str, config: str | None = None, bad_rows: str = "error") -> list[Source]:
    """Do `load_sources` for one path, without anything about its columns; `config` is of a hub data set."""

    if isinstance(path, InMemory):
        return [Source(path, path.table, os.getcwd())]
    if "://" in path:
        raise DataError(f"{path} is a URL, and data are not fetched by URL: download the file and give its path")
    if os.path.isfile(path):
        return [_open_file(path, bad_rows)]
    if os.path.isdir(path):
        return _open_folder(path, split, bad_rows)
    if glob.has_magic(path):
        files = sorted(name for name in glob.glob(path, recursive=True) if kind_of(name))
        if not files:
            raise DataError(f"no {KIND_NAMES} file matches {path}: check the pattern")
        return [_open_file(name, bad_rows) for name in files]
    if HUB_ID.fullmatch(path) and kind_of(path) is None and not path.startswith("."):
        return [_open_hub(path, split, config)]
    raise DataError(f"{path} does not exist{nearest_file(Path(path))}")


def _open_file(path: str, bad_rows: str) -> Source:
    table = _undecoded(open_file(path, bad_rows))
    return Source(os.path.basename(path), table, os.path.dirname(os.path.abspath(path)))


def _open_folder(path: str, split: str, bad_rows: str) -> list[Source]:
    from datasets import load_from_disk
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    if os.path.exists(os.path.join(path, "state.json")) or os.path.exists(os.path.join(path, "dataset_dict.json")):
        try:
            saved: Any = load_from_disk(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is a save_to_disk folder that cannot be read: {error}") from error
        if isinstance(saved, dict):
            saved = _choose(saved, split, path)
        table = _undecoded(saved)
        name = os.path.basename(os.path.abspath(path))
        return [Source(name, table, os.path.abspath(path))]
    try:
        splits = DataFilesDict.from_patterns(get_data_patterns(path), base_path=path, allowed_extensions=list(KINDS))
    except (EmptyDatasetError, FileNotFoundError):
        splits = {}
    files = {name: [file for file in sorted(set(names)) if kind_of(file)] for name, names in splits.items() if names}
    if not any(files.values()):
        # Pictures whose names hold that of a split (`images/train_1.jpg`) hide a table whose name does not.
        files = {"train": [str(file) for file in visible_files(Path(path)) if kind_of(str(file))]}
    if not any(files.values()):
        raise DataError(f"the folder {path} holds no {KIND_NAMES} file and was not written by save_to_disk")
    return [_open_file(file, bad_rows) for file in _choose(files, split, path)]


def _open_hub(name: str, split: str, config: str | None) -> Source:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    here = nearest_file(Path(name))
    if not hub_answers() and (here or ("/" in name and Path(name).parent.is_dir())):
        # The client of the hub would try for half a minute.
        raise DataError(f"{name} is no file or folder here{here or ', and the hub cannot be reached'}")
    try:
        table: Any = load_dataset(name, config, split=split)
    except DatasetNotFoundError as error:
        raise DataError(f"{name} is no file or folder here{here}, nor a readable hub data set") from error
    except (ConnectionError, OSError) as error:
        raise DataError(f"{name} is no file or folder here, and the hub cannot be reached ({error})") from error
    except ValueError as error:
        raise DataError(f"{name} cannot be loaded from the hub: {error}") from error
    return Source(name, _undecoded(table), os.getcwd())


def _choose(splits: dict[str, Any], split: str, path: str) -> Any:
    if split not in splits:
        raise DataError(f"{path} has no split {split}: it has {', '.join(sorted(map(str, splits)))}")
    return splits[split]


def _undecoded(table: Any) -> Any:
    """Return the table with its images and videos as `{"bytes", "path"}`."""
    from datasets import Dataset, DatasetInfo, Features, Image, Video

    def plain(feature: Any) -> Any:
        if isinstance(feature, (Image, Video)):
            return type(feature)(decode=False)
        if isinstance(feature, dict):
            return {name: plain(inner) for name, inner in feature.items()}
        if hasattr(feature, "feature"):
            return type(feature)(plain(feature.feature))
        return feature

    features = Features({name: plain(feature) for name, feature in table.features.items()})
    if features == table.features:
        return table
    # `Dataset.cast` would write a copy of every image, although the stored columns are the same.
    info = DatasetInfo(features=features)
    return Dataset(table.data, info=info, split=table.split, indices_table=table._indices)


def columns_of(source: Source) -> set[str]:
    """Return the names of a table's columns."""
    if columns := set(source.columns):
        return columns
    if len(source.table):
        raise unreadable(source.path, ValueError("none of its lines is valid json"))
    raise DataError(f"{source.path} is empty: it has no rows")


def first_rows(source: Source) -> list[dict[str, Any] | RowError]:
    """Return the cells of the first rows of a table."""
    return read_cells(source, range(min(FIRST_ROWS, len(source.table))))


def read_cells(source: Source, rows: Sequence[int]) -> list[dict[str, Any] | RowError]:
    """Return the cells of rows of a table, or an error for a row with text that is not UTF-8."""
    try:
        return [*source.rows(source.table[list(rows)])]
    except UnicodeDecodeError as error:  # pyarrow's json parser accepts such text
        if len(rows) > 1:
            return [cells for row in rows for cells in read_cells(source, [row])]
        location = first_non_utf8(source.path) if os.path.isfile(source.path) else None
        reason = f"the first such byte: {location}" if location else error.reason
        return [RowError(f"it is not UTF-8 text ({reason}): save the file as UTF-8")]
