"""`vlmrm check-data`: a report on preference data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vlmrm.config import parse
from vlmrm.conversation import Conversation
from vlmrm.data.arguments import DataArguments
from vlmrm.data.check import check_data, format_report
from vlmrm.errors import ConfigError
from vlmrm.logs import say
from vlmrm.settings import key

RECENT = 8  # processed images and videos that are kept: the answers of a row share those of its prompt


@dataclass
class CheckArguments:
    model_name_or_path: str | None = key(
        None, "Checkpoint whose tokens to count; without it lengths are in characters."
    )
    media_sample: int | None = key(None, "Open the images of only so many rows, chosen at random. Default: of all.")


def check_data_command(words: Sequence[str]) -> int:
    """Print the report on the files at the beginning of `words`; return the exit status, 3 if a row is wrong."""
    files = [*takewhile(lambda word: not word.startswith("-"), words)]
    keys = [*(["--dataset_path", *files] if files else []), *words[len(files) :]]
    arguments, options = parse((DataArguments, CheckArguments), keys, "vlmrm check-data FILE ...")
    if not arguments.dataset_path:
        raise ConfigError("there is nothing to check: name a file, a folder or a hub id of preferences.")
    count = token_counter(options.model_name_or_path, arguments) if options.model_name_or_path else None
    report = check_data(arguments, count_tokens=count, media_sample=options.media_sample)
    say(format_report(report))
    return report.exit_status


def token_counter(model: str, arguments: DataArguments) -> Callable[[Conversation], int]:
    """Return a function that counts the tokens of a conversation, those of its images included."""
    from cachetools import LRUCache

    from vlmrm.modeling import load_processor
    from vlmrm.rendering import MediaLimits, Renderer

    renderer = Renderer(load_processor(model), MediaLimits.of(arguments))
    cache: Any = LRUCache(RECENT)
    return lambda conversation: len(renderer.render(conversation, cache))
