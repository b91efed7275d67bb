"""Rows to score: any layout of preferences, a prompt with its responses, or a whole conversation.

Tables are read by row number, so that any shard can be had without those before it; a stream is read from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlmrm.data.arguments import DataArguments
from vlmrm.data.rows import read_answers
from vlmrm.data.sources import RowReader, check_first_rows, try_read, with_rules
from vlmrm.data.streams import Group
from vlmrm.data.tables import check_layout, open_tables, unreadable
from vlmrm.errors import DataError
from vlmrm.formats import LAYOUTS_TO_SCORE

READ_AT_ONCE = 64  # rows of a stream


@dataclass
class TableRows:
    """The rows of tables, by number."""

    group: Group
    ends: np.ndarray = field(init=False)

    def __post_init__(self):
        tables: list[Any] = [source.table for source, _ in self.group]
        self.ends = np.cumsum(list(map(len, tables)))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return `{"index": its number in the whole input, "comparison": its answers or why it has none}` of each."""
        sources, rules = zip(*self.group, strict=True)
        which = np.searchsorted(self.ends, numbers, side="right")
        starts = np.concatenate([[0], self.ends])[which]
        places = [number - int(start) for number, start in zip(numbers, starts, strict=True)]
        cells = {"index": list(numbers), "source": which.tolist(), "row": places}
        read = RowReader(sources, rules, read_answers)(cells)["comparison"]
        return [{"index": each[0], "comparison": each[1]} for each in zip(numbers, read, strict=True)]


@dataclass
class StreamRows:
    """The rows of streams, in order; how many there are shows at the end."""

    group: Group

    def read(self, wanted: Callable[[int], bool]) -> Iterator[dict[str, Any]]:
        """The rows whose number is `wanted`; the others are passed over unread."""
        number = 0
        for source, rules in self.group:
            place = 0
            try:
                # Not `for row in table`: inside a loader's worker that would share the rows out.
                for batch in source.table.iter(batch_size=READ_AT_ONCE):
                    for i in range(len(next(iter(batch.values())))):
                        place += 1
                        if wanted(number):
                            cells = {name: column[i] for name, column in batch.items()}
                            name = f"{source.name}:{place}"
                            yield {"index": number, "comparison": try_read(cells, name, rules, read_answers)}
                        number += 1
            except (ValueError, OSError) as error:  # what parsers raise; pyarrow's are ValueErrors too
                raise unreadable(source.path, error) from error


def open_rows(
    paths: Sequence[str], *, split: str = "train", image_root: str | None = None, streaming: bool = False
) -> TableRows | StreamRows:
    """Opens what `paths` name, as `open_tables` does: files, folders, patterns, hub ids.

    Raises:
        DataError: when nothing of that name can be read, is empty, or has columns of no known layout.
    """
    sources = [source for path in paths for source in open_tables(path, split, streaming, bad_rows="skip")]
    for source in sources:
        check_layout(source, LAYOUTS_TO_SCORE)
    group = with_rules(sources, DataArguments(image_root=image_root))
    check_first_rows(group, read_answers, LAYOUTS_TO_SCORE)
    if streaming:
        return StreamRows(group)
    rows = TableRows(group)
    if not len(rows):
        raise DataError(f"there are no rows in {', '.join(source.name for source in sources)}")
    return rows
