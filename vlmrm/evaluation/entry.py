"""A row of the table: an entry, opened to score rows, how the key `scorer` names one, and what all entries share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

import yaml
from accelerate import PartialState

from vlmrm.data.arguments import DataArguments
from vlmrm.engine import ScoredRow, workers_beside
from vlmrm.errors import ConfigError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.schema import Origin, Row
from vlmrm.rendering import MediaLimits, MediaStore
from vlmrm.settings import did_you_mean, nearest, nearest_file

IMAGES_LIMIT = 20 * 10**9  # bytes of processed images kept on disk during a sweep
FORMS = {
    "hf": "hf:ID, the id or folder of a sequence classifier",
    "reward": "reward:NAME, a registered reward, or reward:FILE.yaml",
    "judge": "judge:MODEL@http://host:port/v1",
    "python": "python:module.function",
}
SECRETS = ("api_key", "token", "password")
CREDENTIALS = re.compile(rf"(?<=//)[^/?#@]*@|(?<=[?&])((?:{'|'.join(SECRETS)})=)[^&]*")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class SweepRun:
    """The arguments and state that all evaluations of a sweep share."""

    args: EvaluationArguments
    data_args: DataArguments  # of which the keys count that all data sets share
    processes: PartialState
    images: Path  # a folder for processed images
    closed: list[Any] = field(default_factory=list)  # the last checkpoint, which the next of its training takes over
    warnings: set[tuple[str, str]] = field(default_factory=set)  # limits that have been logged, with their reason

    @property
    def workers(self) -> int:
        """The processes that prepare rows ahead of a scorer."""
        return workers_beside(self.processes.device, self.args.dataloader_num_workers)

    def store(self, processor: Any, limits: MediaLimits) -> MediaStore:
        """Return the store of processed images, which checkpoints with an equal processor and limits share."""
        name = f"{processor.image_processor.to_json_string()} {limits}"
        # Each process has a folder of its own, which earlier checkpoints have begun to fill.
        left = IMAGES_LIMIT // self.processes.num_processes - sum(
            file.stat().st_size for file in self.images.iterdir()
        )
        return MediaStore(self.images, left // max(self.workers, 1), name)


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


@dataclass(frozen=True)
class Spec:
    """One scorer as it was written."""

    kind: str  # a key of `FORMS`, `http`, or `checkpoint` for a folder or hub id of ours
    body: str  # what stands between the kind and the options
    options: Mapping[str, str]  # the values after `?`
    text: str  # all of it, without the credentials of an address

    @property
    def suffix(self) -> str:
        """Return the options as they are written, to tell apart scorers of one body."""
        return self.text[self.text.index("?") :] if self.options else ""

    def take(self, names: Collection[str]) -> dict[str, str]:
        """Return the options, all of which must be among `names`."""
        for name in self.options:
            if name in SECRETS:
                raise ConfigError(
                    f"scorer {self.kind}: {name} would be written into the results: name the environment variable "
                    "that holds it, as api_key_env."
                )
            if name not in names:
                choose = f": it takes {', '.join(names)}." if names else ": it takes no options."
                raise ConfigError(f"scorer {self.text} has no option {name}{did_you_mean(name, names, choose)}")
        return dict(self.options)

    def typed(self) -> dict[str, Any]:
        """Return the options as YAML reads them: numbers, true and false."""
        return {name: yaml.safe_load(value) for name, value in self.options.items()}


def read_spec(text: str) -> Spec:
    """Return a scorer's specification."""
    if Path(text).is_dir():
        return Spec("checkpoint", text, {}, text)
    head, mark, query = text.partition("?")
    kind, colon, body = head.partition(":")
    text = CREDENTIALS.sub(lambda match: f"{match[1]}***" if match[1] else "", text)
    if kind in ("http", "https") and colon:
        return Spec("http", head, _options(text, query), text)
    if kind in FORMS and colon:
        if not body:
            raise ConfigError(f"scorer {text} names nothing: write {FORMS[kind]}.")
        return Spec(kind, body, _options(text, query), text)
    if colon and re.fullmatch(r"\w+", kind):
        near = nearest(kind.lower(), (*FORMS, "http"), 0.5)
        hint = (
            f"did you mean {near}:?" if near else f"write {', '.join(FORMS.values())}, http://host:port or a folder."
        )
        raise ConfigError(f"scorer {text} begins with {kind}:, which is no kind of scorer: {hint}")
    if not mark and HUB_ID.fullmatch(text) and not Path(text).parent.is_dir():
        return Spec("checkpoint", text, {}, text)
    raise ConfigError(f"scorer {text} does not exist{nearest_file(Path(text), ': check the path.')}")


def _options(text: str, query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigError(f"scorer {text}: write its options as ?key=value&key=value.") from None
