"""Offline scoring of tables into a folder of parquet shards: resumable, in bounded memory.

Each rank scores the shards of its own numbers, without talking to other ranks. A job that was killed is continued on
any number of processes: shards that are in the folder are not scored again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import Subset

from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import Columns
from vlmrm.data.comparisons import data_fingerprint, index_rows, open_groups, reader_of
from vlmrm.data.rows import read_answers
from vlmrm.engine import ScoredRow, workers_beside
from vlmrm.errors import ConfigError, VlmrmError
from vlmrm.files import atomic_write, make_folder, write_json
from vlmrm.formats import LAYOUTS_TO_SCORE
from vlmrm.libraries import needs
from vlmrm.logs import progress
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.scorer import LocalScorer
from vlmrm.settings import check_least

if TYPE_CHECKING:
    from datasets import Dataset

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
    input: Sequence[str]  # files, folders, patterns or hub ids
    output: Path
    split: str = "train"
    image_root: str | None = None
    columns: Columns | None = None
    device: str | None = None
    dtype: str = "auto"
    shard_rows: int = 4096
    batch_rows: int = 32  # read at a time
    num_workers: int | None = None  # processes that read ahead of the model; by default `workers_beside` it
    max_tokens_per_batch: int = 16384

    def __post_init__(self):
        check_least(self, 1, "shard_rows", "batch_rows")

    @property
    def shards(self) -> Shards:
        return Shards(Path(self.output), self.shard_rows)

    def open_rows(self) -> Dataset:
        """Open the input; rows are read by number, so that a shard needs none before it."""
        reading = DataArguments(image_root=self.image_root, columns=self.columns, bad_rows="skip")
        groups = open_groups(self.input, self.split, reading, read_answers, LAYOUTS_TO_SCORE)
        return index_rows(groups, read_answers)

    def load_scorer(self) -> LocalScorer:
        return load_local_scorer(
            self.model, device=self.device, dtype=self.dtype, max_tokens_per_batch=self.max_tokens_per_batch
        )

    def settings(self, scorer: LocalScorer, rows: Dataset) -> dict[str, Any]:
        """Return all that a score depends on, to be stored with the scores."""
        return {
            "model": str(self.model),
            "dtype": str(scorer.model.dtype).removeprefix("torch."),
            "weights": scorer.loaded.digest,
            "data": data_fingerprint([source.path for source in reader_of(rows).sources]),
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
    rows: Dataset

    def __post_init__(self):
        self.job.shards.check_settings(self.job.settings(self.scorer, self.rows))

    def run(self, rank: int, ranks: int) -> int:
        """Write this rank's missing shards and return the number of rows of the input."""
        shards, count = self.job.shards, len(self.rows)
        self.write([n for n in range(rank, shards.count(count), ranks) if not shards.is_done(n)], show=rank == 0)
        return count

    def write(self, numbers: Sequence[int], *, show: bool = False) -> None:
        """Score and write these shards, one after the other; `show` draws a progress bar."""
        if not numbers:
            return
        job, size = self.job, self.job.shard_rows
        indices: Any = np.concatenate([np.arange(n * size, min((n + 1) * size, len(self.rows))) for n in numbers])
        wanted: Any = Subset(cast("Any", self.rows), indices)
        workers = workers_beside(self.scorer.model.device, job.num_workers)
        rows = self.scorer.engine.rows(wanted, batch_size=job.batch_rows, num_workers=workers)
        rows = progress(rows, "scoring", len(indices), show=show)
        for number, scored in groupby(rows, key=lambda row: row.index // size):
            job.shards.write(number, list(scored), sorted(self.scorer.outputs.named))


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

    def write(self, number: int, scored: Sequence[ScoredRow], outputs: Sequence[str] = ()) -> None:
        """Write a shard atomically; each of `outputs` has a column of its own, `output_NAME`."""
        of_outputs = [pa.field(f"output_{name}", pa.list_(pa.float32())) for name in outputs]
        table = pa.Table.from_pylist([_cells(row) for row in scored], schema=pa.schema([*SCHEMA, *of_outputs]))
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
    outputs = {f"output_{name}": values for name, values in row.outputs.items()}
    return {"row": row.index, "id": row.id, **outcome, **outputs}


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
