"""Offline scoring: every row of a table or stream into a folder of parquet shards, resumable, in bounded memory.

Ranks share the shards out by their numbers and never talk to each other: there is nothing to wait for or to hang, and
a job that was killed goes on, on as many processes as one likes, with the shards that are absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from tqdm import tqdm

from vlmrm.data.fingerprint import data_fingerprint
from vlmrm.errors import ConfigError
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.rows import StreamRows, TableRows, open_rows
from vlmrm.scoring.scorer import LocalScorer
from vlmrm.scoring.shards import Shards, Summary


@dataclass(frozen=True)
class OfflineJob:
    """What to score, with which model, into which folder. It pickles, for workers on other machines.

    `input` is anything that `open_rows` takes. A shard has `shard_rows` rows and is read `batch_rows` at a time, by
    `num_workers` processes ahead of the model; `max_tokens_per_batch` bounds what the model computes at once.
    """

    model: str
    input: Sequence[str]
    output: Path
    split: str = "train"
    image_root: str | None = None
    streaming: bool = False
    device: str | None = None
    dtype: str = "auto"
    shard_rows: int = 4096
    batch_rows: int = 32
    num_workers: int = 0
    max_tokens_per_batch: int = 16384

    def __post_init__(self):
        for name in ("shard_rows", "batch_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1.")

    @property
    def shards(self) -> Shards:
        return Shards(Path(self.output), self.shard_rows)

    def open_rows(self) -> TableRows | StreamRows:
        return open_rows(self.input, split=self.split, image_root=self.image_root, streaming=self.streaming)

    def load_scorer(self) -> LocalScorer:
        return load_local_scorer(
            self.model, device=self.device, dtype=self.dtype, max_tokens_per_batch=self.max_tokens_per_batch
        )

    def settings(self, scorer: LocalScorer, rows: TableRows | StreamRows) -> dict[str, Any]:
        """All that a score depends on, to be written beside the scores."""
        return {
            "model": str(self.model),
            "dtype": str(scorer.model.dtype).removeprefix("torch."),
            "weights": scorer.loaded.digest,
            "data": data_fingerprint([source.path for source, _ in rows.group]),
            "split": self.split,
            "image_root": None if self.image_root is None else str(Path(self.image_root).resolve()),
            "shard_rows": self.shard_rows,
        }


def score_offline(job: OfflineJob, *, rank: int = 0, ranks: int = 1) -> Summary | None:
    """Scores this rank's absent shards; the summary, once those of all ranks are there.

    A row that cannot be scored, a malformed line of a jsonl file too, has its error in the shard and stops nothing.

    Raises:
        ConfigError: when the folder holds scores made with other settings.
        DataError: when the input cannot be opened or, later, a file of it cannot be parsed.
        CheckpointError: when the model cannot be opened.
    """
    rows = job.open_rows()
    total = ShardScoring(job, job.load_scorer(), rows).run(rank, ranks)
    return job.shards.summary(total)


@dataclass
class ShardScoring:
    """Scores shards of one input with one model."""

    job: OfflineJob
    scorer: LocalScorer
    rows: TableRows | StreamRows

    def __post_init__(self):
        self.job.shards.check_settings(self.job.settings(self.scorer, self.rows))

    def run(self, rank: int, ranks: int) -> int:
        """Writes this rank's absent shards; how many rows the input has."""
        shards = self.job.shards
        if isinstance(self.rows, StreamRows):
            stream = _Stream(self.rows, shards, rank, ranks)
            self._write(stream, None, show=rank == 0)
            return int(stream.count)
        numbers = [n for n in range(rank, shards.count(len(self.rows)), ranks) if not shards.is_done(n)]
        self.write(numbers, show=rank == 0)
        return len(self.rows)

    def write(self, numbers: Sequence[int], *, show: bool = False) -> None:
        """Scores and writes these shards of tables, one after the other; `show` draws a progress bar."""
        rows: Any = self.rows
        table = _Table(rows, self.job.shard_rows, numbers)
        self._write(table, len(table), show=show)

    def _write(self, dataset: Any, total: int | None, *, show: bool) -> None:
        job, shards = self.job, self.job.shards
        rows = self.scorer.engine.rows(dataset, batch_size=job.batch_rows, num_workers=job.num_workers)
        shown = tqdm(rows, "scoring", total, unit="row", disable=None if show else True)
        for number, scored in groupby(shown, key=lambda row: row.index // shards.size):
            shards.write(number, list(scored))


@dataclass
class _Table:
    """The rows of some shards, for a loader: row i of shard j in one sequence, no list of which is held."""

    rows: TableRows
    size: int
    numbers: Sequence[int]

    def __post_init__(self):
        sizes = [min(self.size, len(self.rows) - number * self.size) for number in self.numbers]
        self.ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, Any]]:
        which = np.searchsorted(self.ends, places, side="right")
        starts = np.concatenate([[0], self.ends])[which]
        firsts = np.asarray(self.numbers)[which] * self.size
        return self.rows.read((firsts + places - starts).tolist())


class _Stream(IterableDataset):
    """The rows of a stream that are of this rank's absent shards; `count` is how many have passed by."""

    def __init__(self, rows: StreamRows, shards: Shards, rank: int, ranks: int):
        self.rows, self.shards, self.rank, self.ranks = rows, shards, rank, ranks
        self.count = torch.zeros((), dtype=torch.long).share_memory_()  # a loader's worker counts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        current, mine = -1, False

        def wanted(number: int) -> bool:
            nonlocal current, mine
            self.count.fill_(number + 1)
            if (shard := number // self.shards.size) != current:  # once for each: a shard is scored whole or not
                current, mine = shard, shard % self.ranks == self.rank and not self.shards.is_done(shard)
            return mine

        return self.rows.read(wanted)
