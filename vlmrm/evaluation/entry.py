"""What a row of the table is about: an entry, which is opened to score rows, and what all entries of a sweep share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from accelerate import PartialState

from vlmrm.data.arguments import DataArguments
from vlmrm.engine import ScoredRow
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.schema import Origin, Row
from vlmrm.rendering import MediaLimits, MediaStore

IMAGES_LIMIT = 20 * 10**9  # bytes of processed images kept on disk during a sweep


@dataclass(frozen=True)
class SweepRun:
    """The arguments and state that all evaluations of a sweep share."""

    args: EvaluationArguments
    data_args: DataArguments  # of which the keys count that all data sets share
    processes: PartialState
    images: Path  # a folder for processed images
    closed: list[Any] = field(default_factory=list)  # the last checkpoint, which the next of its training takes over
    warnings: set[tuple[str, str]] = field(default_factory=set)  # limits that have been logged, with their reason

    def store(self, processor: Any, limits: MediaLimits) -> MediaStore:
        """Return the store of processed images, which checkpoints with an equal processor and limits share."""
        name = f"{processor.image_processor.to_json_string()} {limits}"
        # Each process has a folder of its own, which earlier checkpoints have begun to fill.
        left = IMAGES_LIMIT // self.processes.num_processes - sum(
            file.stat().st_size for file in self.images.iterdir()
        )
        return MediaStore(self.images, left // max(self.args.dataloader_num_workers, 1), name)


class OpenEntry(Protocol):
    """An entry that is ready to be measured, on any number of data sets, until it is closed.

    Its `interventions` are scored beside the rows as they are; `limits` are why it cannot do others, by name.
    """

    @property
    def interventions(self) -> Collection[str]: ...

    @property
    def limits(self) -> Mapping[str, str]: ...

    def rows(self, dataset: Any, *, batch_size: int, num_workers: int = 0) -> Iterator[ScoredRow]:
        """Yield the scores of the rows `{"index", "comparison"}` of a data set; those with `sampled` altered too."""
        ...

    def origin(self) -> Origin:
        """Return what gave the scores, for the provenance."""
        ...

    def close(self) -> None: ...


class Entry(ABC):
    """What a row of the table is about, before it is opened: its names in the table, and its key in the results."""

    def __init__(self, model: str, checkpoint: str, path: str):
        self.model, self.checkpoint, self.path = model, checkpoint, path

    @property
    def step(self) -> int | None:
        """Return the training step, where it is a checkpoint with one."""
        return None

    @abstractmethod
    def digest(self) -> str | None:
        """Return what changes when its scores may; None where that is known only once it is open."""

    @abstractmethod
    def open(self, run: SweepRun) -> OpenEntry:
        """Open it for the arguments of a sweep."""

    def row(self, error: str | None = None) -> Row:
        """Return its row of the table before it has figures."""
        return {"model": self.model, "checkpoint": self.checkpoint, "path": self.path, "error": error, "seconds": 0.0}
