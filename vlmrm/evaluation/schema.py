"""The schema of evaluation_results.json, its reader and its writer; docs/evaluation.md documents the fields.

The content is plain dictionaries of declared types, figures under their names in METRICS. `load_results` validates it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypeAliasType, TypedDict

from vlmrm.errors import ConfigError
from vlmrm.settings import describe_errors

SCHEMA_VERSION = 4  # raised whenever a field changes its name or meaning; a new metric is absent from older files

strict = with_config(ConfigDict(extra="forbid"))

if TYPE_CHECKING:
    Number = float
    Figures = dict[str, Any]  # a checker cannot know the fields, which METRICS declares
else:
    # JSON has no NaN and no infinity: null stands for a figure that the pairs do not allow.
    Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    # A named tuple, such as an `Estimate`, is an object with its fields.
    Figure = TypeAliasType("Figure", int | Number | list["Figure"] | dict[str, "Figure"])
    Figures = dict[str, Figure]


@strict
class Statistics(TypedDict):
    """Figures of all pairs, by category, and by column of `group_by` and value; the findings of the audit."""

    overall: Figures
    category: dict[str, Figures]
    by: dict[str, dict[str, Figures]]
    audit: NotRequired[list[dict[str, Any]]]


@strict
class Origin(TypedDict):
    """What gave the scores: null stands for what is not known of a scorer that is no checkpoint."""

    weights: str | None  # the digest of the checkpoint, or of what identifies another scorer
    device: str | None
    dtype: str | None
    attention: str | None
    chat_template_sha256: str | None
    checkpoint: dict[str, Any]  # the provenance in its reward_model.json
    scorer: NotRequired[dict[str, str]]  # what else is known of one that is no checkpoint of ours


@strict
class Provenance(Origin):
    """The data, scorer and software behind a row's figures."""

    date: str
    git_commit: str | None
    versions: dict[str, str]
    data: str
    processes: int


@with_config(ConfigDict(extra="allow"))
class Row(TypedDict, extra_items=Number):
    """A checkpoint or another scorer, with the figures of the table beside these fields; none with an `error`."""

    model: str
    checkpoint: str
    path: str
    error: str | None
    dropped_rows: NotRequired[int]
    limits: NotRequired[dict[str, str]]  # the interventions that it could not do, with the reason
    seconds: float
    benchmark: NotRequired[dict[str, Figures]]
    outputs: NotRequired[dict[str, Figures]]  # of a model of several, the figures of each by its name
    altered_outputs: NotRequired[dict[str, dict[str, Figures]]]  # what each loses, and moves by, under interventions
    statistics: NotRequired[Statistics]
    provenance: NotRequired[Provenance]


@strict
class Best(TypedDict):
    """The checkpoint that `metric` chooses, with its value there."""

    metric: str
    value: Number
    without_luck: NotRequired[Figures | None]  # as new prompts would show it, None where it cannot be known
    model: str
    checkpoint: str
    path: str


@strict
class ResultsFile(TypedDict):
    """The content of a results file."""

    schema_version: int
    set_name: NotRequired[str]  # the name of the data in a suite
    settings: dict[str, Any]  # all that figures depend on besides the checkpoint
    leakage: dict[str, Any] | None  # that of `vlmrm.evaluation.leakage`, None without `train_data`
    best: Best | None  # None where no row has the figure to choose by
    results: list[Row]


_READER = TypeAdapter(ResultsFile)


def details_path(path: Path) -> Path:
    """Return the .json of results by any of their files: table, details or scored pairs."""
    if path.name.endswith(".scores.parquet"):  # a name may have dots of its own
        return path.with_name(f"{path.name.removesuffix('.scores.parquet')}.json")
    return path.with_suffix(".json")


def load_results(path: str | Path) -> ResultsFile:
    """Return the results of a sweep, checked against this file's types.

    [row] = load_results("results/mine.json")["results"]
    """
    path = Path(path)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as results of a sweep: {error}.") from error
    if not isinstance(saved, dict) or "results" not in saved:
        raise ConfigError(f"{path} is not a results file of vlmrm: choose another output_file.")
    if saved.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {saved.get('schema_version', 0)}, this is version {SCHEMA_VERSION}: evaluate "
            "again into another output_file, or use the vlmrm that wrote it."
        )
    try:
        content = _READER.validate_python(saved)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a valid results file: {describe_errors(error.errors())}; evaluate again."
        ) from error
    for row in content["results"]:  # a pydantic before 2.12 knows nothing of `extra_items`
        row.update({name: math.nan for name, value in row.items() if value is None and name != "error"})  # ty: ignore
    return content


def dump_results(content: ResultsFile) -> str:
    """Return JSON, with null for each number that is NaN or infinite."""
    return _READER.dump_json(content, indent=2).decode() + "\n"
