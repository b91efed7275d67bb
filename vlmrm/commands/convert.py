"""`vlmrm convert`: data of any layout in the canonical form. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vlmrm.data.columns import parse_columns
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.files import require_new_file
from vlmrm.libraries import needs
from vlmrm.logs import counted, say

if TYPE_CHECKING:
    from datasets import Dataset


@Parameter(name="*")
@dataclass(frozen=True)
class Reading:
    """How the rows are read.

    Args:
        split: Split of hub data sets and save_to_disk folders.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
        path_rewrites: OLD=NEW prefixes to replace in media paths, tried in order.
        bad_rows: What happens to rows that cannot be read: stop with an error, or skip and count them.
    """

    split: str = "train"
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    image_root: str | None = None
    path_rewrites: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    bad_rows: Literal["error", "skip"] = "error"


READING = Reading()


@needs("train", "reading data sets")
def convert(*data: str, output: Path, reading: Reading = READING) -> None:
    """Write preferences of any layout in one form: prompt, chosen and rejected, or responses and scores.

    Args:
        data: Files, folders, patterns or hub ids of preferences.
        output: The new file, .jsonl.
    """
    from vlmrm.data.canonical import check_output, write_comparisons
    from vlmrm.data.comparisons import iterate_readable

    require_new_file(output)
    check_output(output)
    rows, left_out = _read(data, reading)
    count = write_comparisons(partial(iterate_readable, rows), output)
    say(f"wrote {counted(count, 'row')} to {output}{left_out}")


def _read(data: Sequence[str], options: Reading) -> tuple[Dataset, str]:
    """Return the rows of `data` that can be read, and the end of a summary about the others."""
    from vlmrm.data.arguments import DataArguments
    from vlmrm.data.comparisons import iterate_comparisons, load_comparisons

    reading = DataArguments(
        dataset_path=[*data],
        dataset_split=options.split,
        columns=parse_columns(options.columns),
        image_root=options.image_root,
        path_rewrites=options.path_rewrites or [],
        bad_rows=options.bad_rows,
    )
    if not reading.dataset_path:
        raise ConfigError("there is nothing to read: name a file, a folder or a hub id of preferences.")
    dataset: Any = load_comparisons(reading.dataset_path, arguments=reading, split=reading.dataset_split)
    errors: dict[int, RowError] = {}
    for number, row in enumerate(iterate_comparisons(dataset)):
        if isinstance(row, RowError):
            if reading.bad_rows == "error":
                raise row
            errors[number] = row
    if not errors:
        return dataset, ""
    first = next(iter(errors.values()))
    if len(errors) == len(dataset):
        raise DataError(f"none of {counted(len(errors), 'row')} can be read, the first as {first}")
    kept = [number for number in range(len(dataset)) if number not in errors]
    left_out = f"; left {counted(len(errors), 'row')} out that cannot be read, the first as {first}"
    return dataset.select(kept), left_out
