"""Offline scoring of a table or stream into a folder of parquet shards: resumable, in bounded memory.

Each rank scores the shards of its own numbers, without talking to other ranks. A job that was killed is continued on
any number of processes: shards that are in the folder are not scored again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset, Subset

from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import Columns
from vlmrm.data.comparisons import RowReader, SourceGroup, data_fingerprint, open_groups
from vlmrm.data.kinds import unreadable
from vlmrm.data.rows import read_answers, read_or_error
from vlmrm.engine import ScoredRow
from vlmrm.errors import ConfigError, DataError, VlmrmError
from vlmrm.files import atomic_write, make_folder, write_json
from vlmrm.formats import LAYOUTS_TO_SCORE
from vlmrm.libraries import needs
from vlmrm.logs import progress
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.scorer import LocalScorer
from vlmrm.settings import check_least

READ_AT_ONCE = 64  # rows of a stream
# Readers of a folder of parquet files (pandas, datasets, Spark) ignore names that begin with `_` or `.`.
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
class OfflineJob:
    """An input to score, a model, and an output folder. It pickles, for workers on other machines."""

    model: str
    input: Sequence[str]  # anything that `open_rows` takes
    output: Path
    split: str = "train"
    image_root: str | None = None
    columns: Columns | None = None
    streaming: bool = False
    device: str | None = None
    dtype: str = "auto"
    shard_rows: int = 4096
    batch_rows: int = 32  # read at a time
    num_workers: int = 0  # processes that read ahead of the model
    max_tokens_per_batch: int = 16384

    def __post_init__(self):
        check_least(self, 1, "shard_rows", "batch_rows")

    @property
    def shards(self) -> Shards:
        return Shards(Path(self.output), self.shard_rows)

    def open_rows(self) -> TableRows | StreamRows:
        reading = DataArguments(image_root=self.image_root, columns=self.columns)
        return open_rows(self.input, split=self.split, reading=reading, streaming=self.streaming)

    def load_scorer(self) -> LocalScorer:
        return load_local_scorer(
            self.model, device=self.device, dtype=self.dtype, max_tokens_per_batch=self.max_tokens_per_batch
        )

    def settings(self, scorer: LocalScorer, rows: TableRows | StreamRows) -> dict[str, Any]:
        """Return all that a score depends on, to be stored with the scores."""
        return {
            "model": str(self.model),
            "dtype": str(scorer.model.dtype).removeprefix("torch."),
            "weights": scorer.loaded.digest,
            "data": data_fingerprint([source.path for source, _ in rows.group]),
            "split": self.split,
            "image_root": None if self.image_root is None else str(Path(self.image_root).resolve()),
            "columns": self.columns,
            "shard_rows": self.shard_rows,
        }


def score_offline(job: OfflineJob, *, rank: int = 0, ranks: int = 1) -> Summary | None:
    """Score this rank's missing shards; return the summary once the shards of all ranks are there, else None.

    A row that cannot be scored, such as a malformed line of a jsonl file, gets its error in the shard.
    """
    rows = job.open_rows()
    total = ShardScoring(job, job.load_scorer(), rows).run(rank, ranks)
    return job.shards.summary(total)


@dataclass
class ShardScoring:
    """One model and one input, scored shard by shard."""

    job: OfflineJob
    scorer: LocalScorer
    rows: TableRows | StreamRows

    def __post_init__(self):
        self.job.shards.check_settings(self.job.settings(self.scorer, self.rows))

    def run(self, rank: int, ranks: int) -> int:
        """Write this rank's missing shards and return the number of rows of the input."""
        shards = self.job.shards
        if isinstance(self.rows, StreamRows):
            stream = _Stream(self.rows, shards, rank, ranks)
            self._write(stream, None, show=rank == 0)
            return int(stream.count)
        numbers = [n for n in range(rank, shards.count(len(self.rows)), ranks) if not shards.is_done(n)]
        self.write(numbers, show=rank == 0)
        return len(self.rows)

    def write(self, numbers: Sequence[int], *, show: bool = False) -> None:
        """Score and write these shards of tables, one after the other; `show` draws a progress bar."""
        rows: Any = self.rows
        size = self.job.shard_rows
        if numbers:
            indices: Any = np.concatenate([np.arange(n * size, min((n + 1) * size, len(rows))) for n in numbers])
            self._write(Subset(rows, indices), len(indices), show=show)

    def _write(self, dataset: Any, total: int | None, *, show: bool) -> None:
        job, shards = self.job, self.job.shards
        rows = self.scorer.engine.rows(dataset, batch_size=job.batch_rows, num_workers=job.num_workers)
        rows = progress(rows, "scoring", total, show=show)
        for number, scored in groupby(rows, key=lambda row: row.index // shards.size):
            shards.write(number, list(scored))


class _Stream(IterableDataset):
    """The rows of a stream that belong to this rank's missing shards; `count` is the number of rows read so far."""

    def __init__(self, rows: StreamRows, shards: Shards, rank: int, ranks: int):
        self.rows, self.shards, self.rank, self.ranks = rows, shards, rank, ranks
        self.count = torch.zeros((), dtype=torch.long).share_memory_()  # shared: a loader's worker counts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        current, scored_here = -1, False

        def is_wanted(number: int) -> bool:
            nonlocal current, scored_here
            self.count.fill_(number + 1)
            if (shard := number // self.shards.size) != current:  # one answer for all rows of a shard
                current, scored_here = shard, shard % self.ranks == self.rank and not self.shards.is_done(shard)
            return scored_here

        return self.rows.read(is_wanted)


def open_rows(
    paths: Sequence[str], *, split: str = "train", reading: DataArguments | None = None, streaming: bool = False
) -> TableRows | StreamRows:
    """Open files, folders, patterns or hub ids, as `load_sources` does; `reading` says how.

    Tables are read by row number, so that a shard needs none before it; a stream is read from its start.
    """
    reading = replace(reading or DataArguments(), bad_rows="skip")
    groups = open_groups(paths, split, reading, streaming, read_answers, LAYOUTS_TO_SCORE)
    group = [pair for of_path in groups for pair in of_path]
    if streaming:
        return StreamRows(group)
    rows = TableRows(group)
    if not len(rows):
        raise DataError(f"there are no rows in {', '.join(source.name for source, _ in group)}")
    return rows


@dataclass
class TableRows:
    """Rows of tables, read by number."""

    group: SourceGroup
    ends: np.ndarray = field(init=False)

    def __post_init__(self):
        tables: list[Any] = [source.table for source, _ in self.group]
        self.ends = np.cumsum(list(map(len, tables)))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return `{"index": number in the whole input, "comparison": the answers, or an error}` of each row."""
        numbers = [int(number) for number in numbers]
        sources, rules = zip(*self.group, strict=True)
        which = np.searchsorted(self.ends, numbers, side="right")
        starts = np.concatenate([[0], self.ends])[which]
        offsets = [number - int(start) for number, start in zip(numbers, starts, strict=True)]
        cells = {"index": numbers, "source": which.tolist(), "row": offsets}
        comparisons = RowReader(sources, rules, read_answers)(cells)["comparison"]
        pairs = zip(numbers, comparisons, strict=True)
        return [{"index": number, "comparison": comparison} for number, comparison in pairs]


@dataclass
class StreamRows:
    """Rows of streams, in order; their number is known at the end."""

    group: SourceGroup

    def read(self, is_wanted: Callable[[int], bool]) -> Iterator[dict[str, Any]]:
        """Yield the rows for whose number `is_wanted` is true; other rows are not parsed."""
        number = 0
        for source, rules in self.group:
            line = 0
            try:
                # Not `for row in table`: in a loader's worker that would split the rows among the workers.
                for batch in source.table.iter(batch_size=READ_AT_ONCE):
                    for cells in source.rows(batch):
                        line += 1
                        if is_wanted(number):
                            name = f"{source.name}:{line}"
                            yield {"index": number, "comparison": read_or_error(cells, name, rules, read_answers)}
                        number += 1
            except (ValueError, OSError) as error:  # of parsers; pyarrow's are ValueErrors too
                raise unreadable(source.path, error) from error


class Summary(NamedTuple):
    """The number of rows of a finished folder, and of errors among them."""

    rows: int
    errors: int


@dataclass(frozen=True)
class Shards:
    """A folder of parquet shards: shard k has the rows k·size to (k+1)·size - 1 of the input."""

    folder: Path
    size: int

    def path(self, number: int) -> Path:
        return self.folder / f"scores-{number:06d}.parquet"

    def is_done(self, number: int) -> bool:
        return self.path(number).exists()

    def count(self, rows: int) -> int:
        """Return the number of shards of `rows` rows."""
        return -(-rows // self.size)

    def write(self, number: int, scored: Sequence[ScoredRow]) -> None:
        """Write a shard atomically."""
        table = pa.Table.from_pylist([_cells(row) for row in scored], schema=SCHEMA)
        with atomic_write(self.path(number)) as temporary:
            pq.write_table(table, temporary)

    def summary(self, rows: int) -> Summary | None:
        """Return the summary of an input of `rows` rows, from the footers of its shards; None while one is missing."""
        paths = [self.path(number) for number in range(self.count(rows))]
        if not all(path.exists() for path in paths):
            return None
        return Summary(rows, sum(_errors(path) for path in paths))

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings, or compare them with those of the shards in the folder; `model` may have moved.

        Of several processes that start together, one writes.
        """
        make_folder(self.folder)
        file = self.folder / SETTINGS
        write_json(file, settings, exclusive=True)
        stored = json.loads(file.read_text(encoding="utf-8"))
        names = [n for n in settings | stored if n != "model" and stored.get(n) != settings.get(n)]
        if names:
            raise ConfigError(
                f"{self.folder} holds scores of other settings ({', '.join(names)}): name a new output folder, or "
                "score as before."
            )


def _cells(row: ScoredRow) -> dict[str, Any]:
    outcome = {"scores": row.scores} if row.error is None else {"error": row.error.reason}
    return {"row": row.index, "id": row.id, **outcome}


def _errors(path: Path) -> int:
    """Return the number of rows with an error, from the statistics of the file's footer."""
    footer = pq.read_metadata(path)
    column = SCHEMA.get_field_index("error")
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    # A footer numbers leaf columns, and each column of SCHEMA has one leaf.
    return sum(group.num_rows - group.column(column).statistics.null_count for group in groups)


class ShardWorker:
    """A Ray actor that loads the model and opens the input once."""

    def __init__(self, job: OfflineJob):
        self.scoring = ShardScoring(job, job.load_scorer(), job.open_rows())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.scoring.write(batch["shard"].tolist())
        return batch


def score_on_ray(job: OfflineJob, workers: int) -> Summary | None:
    """Score as `score_offline` does, on `workers` actors of the cluster, each with a GPU where the cluster has any.

    The cluster is that of RAY_ADDRESS or, without it, this machine. All of it must reach input, model and output: on a
    shared file system, or the hub for input and model.
    """
    with needs("ray", "scoring on Ray"):
        import ray
        import ray.data
        import ray.exceptions
    job = _with_absolute_paths(job)
    rows = job.open_rows()
    if not isinstance(rows, TableRows):
        raise ConfigError("Ray workers read rows by number, which a stream does not allow: leave out streaming.")
    shards = job.shards
    missing = [{"shard": number} for number in range(shards.count(len(rows))) if not shards.is_done(number)]
    if missing:
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        scored = ray.data.from_items(missing).map_batches(
            ShardWorker,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
        )
        try:
            for _ in scored.iter_batches(batch_size=None):
                pass
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]  # of the worker's traceback
            raise VlmrmError(
                f"a Ray worker failed ({reason}): fix that, and run again for the missing shards."
            ) from error
    return shards.summary(len(rows))


def _with_absolute_paths(job: OfflineJob) -> OfflineJob:
    """Return the job with absolute paths: workers start in other folders."""

    def absolute(path: str) -> str:
        return str(Path(path).resolve()) if Path(path).exists() else path  # else a hub id or a pattern

    return replace(
        job,
        model=absolute(job.model),
        input=[absolute(path) for path in job.input],
        output=job.output.resolve(),
        image_root=None if job.image_root is None else absolute(job.image_root),
    )
