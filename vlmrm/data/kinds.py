"""Kinds of data files: parquet, arrow, json(l), csv, tsv and xlsx, compressed texts among them.

Each is opened by `datasets` without being read into memory, and an error about its content names the line.
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from vlmrm.data.columns import MALFORMED
from vlmrm.errors import ConfigError, DataError, first_line
from vlmrm.files import atomic_write, make_folder
from vlmrm.libraries import missing

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("vlmrm")

KINDS = {
    **{".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"},
    **{".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"},
    ".xlsx": "xlsx",
}
TEXTS = ("json", "csv")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # of texts; by pyarrow's names
KIND_NAMES = "parquet, arrow, json, jsonl, csv, tsv or xlsx (texts also as .gz or .zst)"
LINES = (".jsonl", ".ndjson")  # one object per line, so a malformed line does not affect the next
SEPARATORS = ",;\t|"
BLOCK = 1 << 20


def kind_of(path: str) -> str | None:
    """Return the kind of a data file by its suffix, that below `.gz` and `.zst`; None for an unknown one."""
    name, suffix = os.path.splitext(path)
    if suffix.lower() in COMPRESSED:
        kind = KINDS.get(Path(name).suffix.lower())
        return kind if kind in TEXTS else None
    return KINDS.get(suffix.lower())


def open_file(path: str, bad_rows: str) -> Dataset:
    """Return the table of a data file.

    With `bad_rows` "skip", invalid lines of a jsonl file become rows with the reason in the column `MALFORMED`.
    """
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    kind = kind_of(path)
    if kind is None:
        raise DataError(f"{path} is of no kind that can be read: use {KIND_NAMES}")
    plain = plain_copy(path)
    with open(plain, "rb") as file:
        if not file.read(BLOCK).removeprefix(BOM_UTF8).strip():
            raise DataError(f"{path} is empty: it has no rows")
    if kind == "xlsx":
        return Dataset.from_pandas(_read_xlsx(path), preserve_index=False)
    by_line = bad_rows == "skip" and Path(plain).suffix.lower() in LINES
    options: Any = {"sep": _separator(plain, path)} if kind == "csv" else {}
    try:
        opened: Any = load_dataset(kind, data_files=glob.escape(plain), split="train", **options)
        return opened
    except (DatasetGenerationError, ValueError, OSError) as error:
        if "corresponds to no data" in str(error):
            raise DataError(f"{path} is empty: it has no rows") from error
        if not by_line:
            raise unreadable(path, error) from error
        return _load_lines(path, plain, error)


def plain_copy(path: str) -> str:
    """Return the path of a text without its compression: a copy in the cache of `datasets`, or the file itself."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() not in COMPRESSED:
        return path
    import pyarrow as pa

    def decompress(copy: Path) -> None:
        try:
            with pa.input_stream(path, compression=COMPRESSED[suffix.lower()]) as source, open(copy, "wb") as file:
                while block := source.read(BLOCK):
                    file.write(block)
        except OSError as error:
            raise DataError(f"{path} cannot be decompressed ({first_line(error)}): fetch it again") from error

    return str(_cached(path, "plain", Path(stem).suffix.lower(), decompress))


def _cached(path: str, folder: str, suffix: str, write: Callable[[Path], None]) -> Path:
    """Return a file in the cache of `datasets` that `write` makes from the file at `path`, anew when that changes."""
    from datasets import config

    status = os.stat(path)
    state = f"{os.path.realpath(path)}:{status.st_mtime_ns}:{status.st_size}"
    name = blake2b(state.encode(), digest_size=16).hexdigest()
    copy = Path(config.HF_DATASETS_CACHE) / f"vlmrm_{folder}" / f"{name}{suffix}"
    if not copy.exists():
        make_folder(copy.parent)
        with atomic_write(copy) as temporary:
            write(temporary)
    return copy


def _separator(plain: str, path: str) -> str:
    """Return what separates the columns in the first line of a table: the most frequent of `SEPARATORS`."""
    with open(plain, encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next((line for line in file if line.strip()), "")
    counts = {separator: len(next(csv.reader([header], delimiter=separator))) for separator in SEPARATORS}
    best = max(SEPARATORS, key=counts.__getitem__)
    if best != {".tsv": "\t"}.get(Path(plain).suffix.lower(), ","):
        logger.warning("%s: its columns are separated by %r", path, best)
    return best


def _read_xlsx(path: str) -> Any:
    """Return the first sheet of an Excel file; its first row names the columns."""
    import pandas as pd

    try:
        blank: Any = {"keep_default_na": False, "na_values": [""]}  # "None" and "NA" are answers
        sheets: Any = pd.read_excel(path, sheet_name=None, dtype=object, engine="openpyxl", **blank)
    except ImportError:
        raise ConfigError(missing(f"{path} is an Excel file and", "openpyxl", "train")) from None
    except (BadZipFile, KeyError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an Excel file ({error}): save it anew as .xlsx") from error
    (name, frame), *others = sheets.items()
    if others:
        logger.warning("%s: only its first sheet, %s, is read", path, name)
    frame = frame.dropna(how="all").rename(columns=str)
    for column in frame:  # of texts, which may have answers that look like numbers
        if frame[column].map(lambda cell: isinstance(cell, str)).any():
            frame[column] = frame[column].map(str, na_action="ignore")
    return frame


# Lines of json -------------------------------------------------------------------------------------------------------


def _load_lines(path: str, plain: str, error: Exception) -> Dataset:
    """Return the table of a jsonl file with invalid lines, which become rows with the reason.

    `datasets` reads a valid copy of the file, kept in its cache under a name that changes with the file.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    def write(copy: Path) -> None:
        total = malformed = 0
        with open(copy, "wb") as file:
            for line, row in _lines_of(plain):
                if MALFORMED in row:
                    malformed += 1
                    line = json.dumps(row).encode()
                elif not total:  # `datasets` takes the columns from the first block of a file
                    line = json.dumps({MALFORMED: "", **row}).encode()
                file.write(line.strip() + b"\n")
                total += 1
        if malformed == total:
            raise unreadable(path, error) from error

    copy = _cached(path, "lines", ".jsonl", write)
    try:
        return load_dataset("json", data_files=glob.escape(str(copy)), split="train")
    except (DatasetGenerationError, ValueError, OSError) as again:
        raise unreadable(path, again) from again


def _lines_of(path: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines of a jsonl file that are not blank, each with its row or `{MALFORMED: reason}`."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = _parse_line(line)
                yield line, row if isinstance(row, dict) else {MALFORMED: f"line {number} is not valid json ({row})"}


def _parse_line(line: bytes) -> dict[str, Any] | str:
    """Return the object of a line, or the reason why it is invalid."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 text: byte {error.start} of it is 0x{line[error.start]:02x}"
    except json.JSONDecodeError as error:
        return f"{error.msg} at column {error.colno}"
    return row if isinstance(row, dict) else "expected an object"


def unreadable(path: str, error: BaseException) -> DataError:
    """Return the error of a data file that cannot be read; for a text file it names the line."""
    kind = kind_of(path) if os.path.isfile(path) else None
    if kind in TEXTS and (location := first_non_utf8(path)):
        return DataError(f"{path} is not UTF-8 text ({location}): save it as UTF-8")
    if kind == "json" and (location := _first_invalid_json(plain_copy(path))):
        return DataError(f"{path}: {location}")
    cause = error.__cause__ or error
    return DataError(f"{path} cannot be read as a table: {first_line(cause)}")


@lru_cache
def first_non_utf8(path: str) -> str | None:
    """Return the location of the first byte of a text file that is not UTF-8; None if there is none."""
    offset = 0
    with open(plain_copy(path), "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number}, byte {offset + error.start} of the file is 0x{line[error.start]:02x}"
            offset += len(line)
    return None


def _first_invalid_json(path: str) -> str | None:
    """Return the first line that does not parse, with the reason; None if the lines, or the whole file, do."""
    with open(path, encoding="utf-8-sig") as file:
        if file.read(1) == "[" or Path(path).suffix.lower() == ".json":
            file.seek(0)
            try:
                json.load(file)
                return None
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Extra data"):  # which means one object per line, under the name .json
                    return f"line {error.lineno} is not valid json ({error.msg})"
    return next((row[MALFORMED] for _, row in _lines_of(path) if MALFORMED in row), None)
