"""Comparisons as a stream: a seed determines the rows and their order.

The `datasets` library mixes streams of a common schema only, so a comparison, or the error of a row that cannot be
read, travels as a pickle of this process.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vlmrm.data.kinds import unreadable
from vlmrm.data.media import PathRules
from vlmrm.data.rows import ReadRow, read_or_error, read_row
from vlmrm.data.tables import Source
from vlmrm.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset

SourceGroup = list[tuple[Source, PathRules]]  # the sources that one path names


def stream_comparisons(
    groups: Sequence[SourceGroup],
    *,
    weights: Sequence[float] | None,
    limit: int | None,
    seed: int,
    buffer: int,
    read: ReadRow = read_row,
) -> IterableDataset:
    """Mix groups of sources, shuffle within a buffer, and read the rows.

    Without weights an epoch has every row once. With weights, each row is drawn from group i with a probability
    proportional to `weights[i]`; exhausted groups restart until the last one is exhausted, which ends the epoch.
    """
    from datasets import Features, IterableDataset, Value, interleave_datasets

    def stream(group: SourceGroup) -> IterableDataset:
        # DataLoader workers divide this list among themselves.
        shards = [(source, rule, read, table) for source, rule in group for table in _shards(source.table)]
        features = Features({"pickled": Value("large_binary")})
        return IterableDataset.from_generator(_pickled, features=features, gen_kwargs={"shards": shards})

    streams = [stream(group) for group in groups]
    if weights is None:
        mixed = interleave_datasets(streams, stopping_strategy="all_exhausted_without_replacement")
    else:
        if min(weights) <= 0 or sum(weights) == float("inf"):
            raise ConfigError(f"dataset_weights are {list(weights)}: with streaming each must be above 0")
        shares = [weight / sum(weights) for weight in weights]
        mixed = interleave_datasets(streams, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")
    shuffled = mixed.shuffle(seed=seed, buffer_size=buffer) if buffer > 1 else mixed
    if limit is not None:
        shuffled = shuffled.take(limit)
    return shuffled.map(_unpickled, with_indices=True, remove_columns=["pickled"])


def _shards(table: Any) -> list[Any]:
    count = table.num_shards
    return [table] if count == 1 else [table.shard(count, index) for index in range(count)]


def _pickled(shards: list[tuple[Source, PathRules, ReadRow, Any]]) -> Iterator[dict[str, bytes]]:
    for source, rule, read, table in shards:
        count = 0
        try:
            # Not `for row in table`, which inside a DataLoader worker would divide the rows a second time.
            for count, batch in enumerate(table.iter(batch_size=1), 1):
                [cells] = source.rows(batch)
                yield {"pickled": pickle.dumps(read_or_error(cells, f"{source.name}:{count}", rule, read))}
        except (ValueError, OSError) as error:  # what parsers raise; pyarrow's are ValueErrors too
            raise unreadable(source.path, error) from error


def _unpickled(row: dict[str, bytes], index: int) -> dict[str, Any]:
    return {"index": index, "comparison": pickle.loads(row["pickled"])}
