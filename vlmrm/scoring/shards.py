"""A folder of scores as parquet shards, each whole or absent, beside the settings that they were made with.

Names that begin with `_` or `.` are passed over by what reads a folder of parquet files (pandas, datasets, Spark).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmrm.engine import ScoredRow
from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, replacing, write_json

SETTINGS = "_settings.json"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("scores", pa.list_(pa.float32())),
        pa.field("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Summary:
    """What a finished folder holds."""

    rows: int
    errors: int


@dataclass(frozen=True)
class Shards:
    """Rows k·size to (k+1)·size - 1 of the input are shard k."""

    folder: Path
    size: int

    def path(self, number: int) -> Path:
        return self.folder / f"scores-{number:06d}.parquet"

    def is_done(self, number: int) -> bool:
        return self.path(number).exists()

    def count(self, rows: int) -> int:
        """How many shards `rows` rows make."""
        return -(-rows // self.size)

    def write(self, number: int, scored: Sequence[ScoredRow]) -> None:
        """Puts a shard in its place at once, whole.

        Raises:
            ConfigError: when it cannot be written, as on a full disk: another run makes the absent shards.
        """
        table = pa.Table.from_pylist([_cells(row) for row in scored], schema=SCHEMA)
        with replacing(self.path(number)) as temporary:
            pq.write_table(table, temporary)

    def summary(self, rows: int) -> Summary | None:
        """Of all shards of an input of `rows` rows, from their footers; None while one is absent."""
        paths = [self.path(number) for number in range(self.count(rows))]
        if not all(path.exists() for path in paths):
            return None
        return Summary(rows, sum(_errors(path) for path in paths))

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Writes the settings, or compares them with those of the shards that are there; `model` may have moved.

        Processes may come at the same time: one of them writes.

        Raises:
            ConfigError: naming what differs, or when the folder cannot be made.
        """
        make_folder(self.folder)
        file = self.folder / SETTINGS
        write_json(file, settings, exclusive=True)
        there = json.loads(file.read_text(encoding="utf-8"))
        names = [n for n in settings | there if n != "model" and there.get(n) != settings.get(n)]
        if names:
            raise ConfigError(
                f"{self.folder} holds scores of other settings ({', '.join(names)}): name a new output folder, or "
                "score as before."
            )


def _cells(row: ScoredRow) -> dict[str, Any]:
    outcome = {"scores": row.scores} if row.error is None else {"error": row.error.reason}
    return {"row": row.index, "id": row.id, **outcome}


def _errors(path: Path) -> int:
    """Rows with an error, from the statistics of the file's footer."""
    footer = pq.read_metadata(path)
    column = SCHEMA.get_field_index("error")
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    # Columns of a file are its leaves, and each of ours is one.
    return sum(group.num_rows - group.column(column).statistics.null_count for group in groups)
