"""Rows to score: any layout of preferences, a prompt with its responses, or a whole conversation.

Tables are read by row number, so that any shard can be had without those before it; a stream is read from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlmrm.data.arguments import DataArguments
from vlmrm.data.messages import to_messages
from vlmrm.data.readers import LAYOUTS, Layout, cells_and_id, check_all_read, recognise, resolved, with_row_id
from vlmrm.data.readers.layout import MEDIA, Reading, image_turn, listed, media_of, turns, with_media
from vlmrm.data.schema import Branch, Comparison
from vlmrm.data.sources import RowReader, check_first_rows, try_read, with_rules
from vlmrm.data.streams import Group
from vlmrm.data.tables import check_layout, open_tables, unreadable
from vlmrm.errors import DataError, RowError

READ_AT_ONCE = 64  # rows of a stream


def _read_plain(row: Mapping[str, Any]) -> Reading:
    prompt = with_media(row, turns(row, row["prompt"]))
    texts = [row["response"]] if "response" in row else listed(row.get("responses", []), "responses")
    answers = [to_messages(text, "assistant") for text in texts]
    answers += [[image_turn(image)] for image in media_of(row, "image", "response_")]
    return Reading([[*prompt, *answer] for answer in answers], [0.0] * len(answers), len(prompt))


def _read_conversation(row: Mapping[str, Any]) -> Reading:
    messages = to_messages(row["messages"], "user")
    if messages[-1]["role"] != "assistant":
        raise RowError("`messages` ends without an assistant message: there is no answer to score")
    conversation = with_media(row, messages)
    return Reading([conversation], [0.0], len(conversation) - 1)


RESPONSES = frozenset({"response", "responses", "response_image", "response_images"})
PLAIN = Layout("prompt / response", _read_plain, frozenset({"prompt"}), RESPONSES, MEDIA | {"system"})
CONVERSATION = Layout("conversation", _read_conversation, frozenset({"messages"}), optional=MEDIA)
LAYOUTS_TO_SCORE = (*LAYOUTS, PLAIN, CONVERSATION)


def read_answers(row: Mapping[str, Any], row_id: str, resolve: Callable[[Any], Any]) -> Comparison:
    """The row's answers as branches. Nothing need be preferred: answers may be alike, or a single one.

    Raises:
        RowError: with the row's id, what is wrong and what to do.
    """
    cells, row_id = cells_and_id(row, row_id)
    with with_row_id(row_id):
        layout = recognise(cells, LAYOUTS_TO_SCORE)
        reading = layout.read(cells)
        if not reading.conversations:
            raise RowError("it has no answer to score")
        branches = [Branch(resolved(branch.messages, resolve), branch.rating) for branch in reading.branches()]
        comparison = Comparison(row_id, resolved(reading.prompt(), resolve), branches)
        check_all_read(cells, layout, reading, comparison, resolve)
        return comparison


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
