"""The keys of `vlmrm train` and `vlmrm eval` as `docs/reference.py` declares them in keys.json, for help and typos.

The classes that own the keys import torch, which takes seconds. The declaration has what help and a check of a
configuration need; a test compares it with the classes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from cyclopts import Parameter as CommandParameter

from vlmrm.config import Configuration, PlainErrors, check_paths, read
from vlmrm.libraries import installed_version
from vlmrm.logs import say

FILE = Path(__file__).with_name("keys.json")
HELP, HELP_ALL = ("--help", "-h"), "--help-all"
SWITCH = ("true", "yes", "t", "y", "1", "false", "no", "f", "n", "0")  # as HF's string_to_bool reads them
KINDS: dict[str, Any] = {"none": NoneType, "list": list, "dict": dict, "str": str}
SAME_KEYS = {"plan": "train"}
PATHS = ("path", "dir", "dirs", "file", "config", "root", "deepspeed")  # ends of the keys of files
WIDTHS = (80, 120)  # of the help, between which the terminal decides


def string_to_bool(word: str) -> bool:
    if word.lower() not in SWITCH:
        raise argparse.ArgumentTypeError(f"write true or false, not {word!r}")
    return SWITCH.index(word.lower()) < 5


TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "string_to_bool": string_to_bool}


@dataclass(frozen=True)
class Key:
    """A key: `topic` is None for those of Hugging Face that help leaves to --help-all; `default` is in YAML."""

    name: str
    topic: str | None
    default: str
    meaning: str
    type: str
    kinds: Sequence[str]
    nargs: str | None
    choices: Sequence[str] | None


@cache
def keys_of(command: str) -> tuple[Key, ...]:
    """Return the keys of a verb in the order of their topics."""
    return tuple(Key(**key) for key in _declared(command)["keys"])


@cache
def _declared(command: str) -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))[SAME_KEYS.get(command, command)]


def stand_in(command: str) -> Callable[..., None]:
    """Return a function with the keys of a verb as its parameters, for the completion of shells."""

    def verb(*words: Any, **keys: Any) -> None: ...

    def hint(key: Key) -> Any:
        values = key.choices or (("true", "false") if key.type == "string_to_bool" else ())
        kind: Any = Path if key.name.endswith(PATHS) else str
        kind = Literal[tuple(values)] if values else kind  # ty: ignore[invalid-type-form]
        meaning = key.meaning.replace("`", "").split(". ")[0]
        return Annotated[kind, CommandParameter(name=f"--{key.name}", help=meaning)]

    of_keys = [Parameter(key.name, Parameter.KEYWORD_ONLY, annotation=hint(key)) for key in keys_of(command)]
    words = Parameter("words", Parameter.VAR_POSITIONAL, annotation=Path)
    setattr(verb, "__signature__", Signature([words, *of_keys]))  # noqa: B010
    return verb


def answered(command: str, summary: str, words: Sequence[str], *flags: str) -> Configuration | None:
    """Print help where `words` ask for it, and return None; otherwise the keys of `words` but for the `flags`."""
    if helped(command, summary, words):
        return None
    config = read_words(command, [word for word in words if word not in flags])
    if isinstance(config, Mapping) and command not in SAME_KEYS:  # a plan lists what is missing
        check_paths(config)
    return config


def helped(command: str, summary: str, words: Sequence[str], reads: str = "CONFIG.yaml") -> bool:
    """Print help where `words` ask for it, and return whether they do."""
    wanted = bool({*HELP, HELP_ALL} & {*words})
    if wanted:
        say(help_text(command, summary, words, reads))
    return wanted


def read_words(command: str, words: Sequence[str]) -> Configuration:
    """Return the keys of a command line and its file, and refuse unknown and ill-typed ones within a moment.

    With other versions of the libraries than those that were declared they stay words: their keys may be others.
    """
    versions = _declared(command)["versions"]
    if any(installed_version(library) != version for library, version in versions.items()):
        return words
    parser = PlainErrors(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for key in keys_of(command):
        const = True if key.nargs == "?" else None
        parser.add_argument(*_flags(key.name), type=TYPES[key.type], nargs=key.nargs, choices=key.choices, const=const)
        if key.type == "string_to_bool" and key.default == "true":
            parser.add_argument(*_flags(f"no_{key.name}"), dest=key.name, action="store_false")
    return read(parser, words, {key.name: {KINDS[kind] for kind in key.kinds} for key in keys_of(command)})


def _flags(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def help_text(command: str, summary: str, words: Sequence[str], reads: str) -> str:
    """Return the help: the first sentence on each of vlmrm's keys, by topic; with --help-all all of every key."""
    every = HELP_ALL in words
    width = min(max(shutil.get_terminal_size(fallback=(WIDTHS[1], 24)).columns, WIDTHS[0]), WIDTHS[1])
    lines = [f"Usage: vlmrm {command} {reads} [--key value ...]", "", summary]
    keys = [key for key in keys_of(command) if every or key.topic is not None]
    for topic, of_topic in groupby(keys, key=lambda key: key.topic):
        lines += ["", f"{topic or 'More keys of Hugging Face'}:"]
        for key in of_topic:
            head = f"  --{key.name} [{key.default}]"
            meaning = " ".join(key.meaning.replace("`", "").split())
            if every:
                indent = " " * 6
                lines += [head, *textwrap.wrap(meaning, width, initial_indent=indent, subsequent_indent=indent)]
                lines += [f"{indent}One of {', '.join(key.choices)}."] if key.choices else []
            else:
                line = f"{head:<38} {meaning.split('. ')[0].rstrip('.')}"
                lines.append(line if len(line) <= width else line[: width - 1].rsplit(" ", 1)[0] + "…")
    if not every and len(keys) < len(keys_of(command)):
        lines += ["", f"vlmrm {command} --help-all has more on each, and the other keys of Hugging Face's Trainer."]
    elif not every:
        lines += ["", f"vlmrm {command} --help-all has more on each."]
    return "\n".join(lines)
