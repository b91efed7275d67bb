"""`vlmrm check-data` and `convert`: preference data of any layout. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vlmrm.commands.evaluation import Words
from vlmrm.config import helped, parse
from vlmrm.conversation import Comparison, Conversation
from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import parse_columns
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.files import require_new_file
from vlmrm.libraries import needs
from vlmrm.logs import counted, say
from vlmrm.settings import key

RECENT = 8  # processed images and videos that are kept: the answers of a row share those of its prompt


@dataclass
class CheckArguments:
    model_name_or_path: str | None = key(None, "Checkpoint whose tokens to count; without it lengths are characters.")
    media_sample: int | None = key(None, "Open the images of only so many rows, chosen at random. Default: of all.")


@needs("train", "reading data sets")
def check_data(*words: Words) -> None:
    """Check preference data: contents, how rows will be read, and which are wrong: FILE ... [--key value]."""
    summary = "Check preference data: contents, how rows will be read, and which are wrong."
    if helped("check-data", summary, words, "FILE ..."):
        return
    from vlmrm.data import check

    files = [*takewhile(lambda word: not word.startswith("-"), words)]
    keys = [*(["--dataset_path", *files] if files else []), *words[len(files) :]]
    arguments, options = parse((DataArguments, CheckArguments), keys, "vlmrm check-data FILE ...")
    if not arguments.dataset_path:
        raise ConfigError("there is nothing to check: name a file, a folder or a hub id of preferences.")
    count = _token_counter(options.model_name_or_path, arguments) if options.model_name_or_path else None
    report = check.check_data(arguments, count_tokens=count, media_sample=options.media_sample)
    say(check.format_report(report))
    raise SystemExit(report.exit_status)


def _token_counter(model: str, arguments: DataArguments) -> Callable[[Conversation], int]:
    """Return a function that counts the tokens of a conversation, those of its images included."""
    from cachetools import LRUCache

    from vlmrm.modeling import load_processor
    from vlmrm.rendering import MediaLimits, Renderer

    renderer = Renderer(load_processor(model), MediaLimits.of(arguments))
    cache: Any = LRUCache(RECENT)
    return lambda conversation: len(renderer.render(conversation, cache))


@needs("train", "reading data sets")
def convert(
    *data: str,
    output: Path,
    split: str = "train",
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    image_root: str | None = None,
    path_rewrites: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    bad_rows: Literal["error", "skip"] = "error",
) -> None:
    """Write preferences of any layout in one form: prompt, chosen and rejected, or responses and scores.

    Args:
        data: Files, folders, patterns or hub ids of preferences.
        output: The new file, .jsonl.
        split: Split of hub data sets and save_to_disk folders.
        columns: Columns that have other names in the data, as NAME=COLUMN (images=file_name prompt=query).
        image_root: Folder of relative image paths. Default: the folder of the file that names them.
        path_rewrites: OLD=NEW prefixes to replace in media paths, tried in order.
        bad_rows: What happens to rows that cannot be read: stop with an error, or skip and count them.
    """
    from vlmrm.data.canonical import check_output, write_comparisons
    from vlmrm.data.comparisons import iterate_comparisons, load_comparisons

    if not data:
        raise ConfigError("there is nothing to read: name a file, a folder or a hub id of preferences.")
    require_new_file(output)
    check_output(output)
    reading = DataArguments(
        columns=parse_columns(columns), image_root=image_root, path_rewrites=path_rewrites or [], bad_rows=bad_rows
    )
    dataset: Any = load_comparisons(data, arguments=reading, split=split)
    errors: list[RowError] = []

    def readable() -> Iterator[Comparison]:
        for row in iterate_comparisons(dataset):
            if not isinstance(row, RowError):
                yield row
            elif bad_rows == "error":
                raise row
            else:
                errors.append(row)
        if len(errors) == len(dataset):
            raise DataError(f"none of {counted(len(errors), 'row')} can be read, the first as {errors[0]}")

    count = write_comparisons(readable, output)
    left = f"; left {counted(len(errors), 'row')} out that cannot be read, the first as {errors[0]}" if errors else ""
    say(f"wrote {counted(count, 'row')} to {output}{left}")
