"""Flat YAML and the command line → dataclasses, by TRL's parser, with errors that name the key and its neighbours.

CONFIG.yaml [--key value ...]        the command line beats the file, the file beats the defaults

A value in a file means what the same word means on the command line: one rule for both.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from trl import TrlParser

from vlmrm.errors import ConfigError
from vlmrm.settings import did_you_mean, load_file

WANTED = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}


def parse(dataclasses: Sequence[Any], argv: Sequence[str], program: str) -> tuple[Any, ...]:
    """Instances of `dataclasses` from `argv`, whose first word may be a YAML or JSON file (also `--config FILE`).

    A file may also hold `env:`, a mapping of environment variables to set.

    Raises:
        ConfigError: for an unknown, duplicate or ill-typed key, naming the nearest key there is.
    """
    parser = _Parser(list(dataclasses), prog=program, allow_abbrev=False)
    path, words = _split_file(argv)
    hints = {name: hint for cls in dataclasses for name, hint in get_type_hints(cls).items()}
    if path is not None:
        _apply_file(path, parser, hints)
    words, nulls = _split_nulls(words, hints)
    parser.set_defaults_with_config(**nulls)
    try:
        # HF would also read a file train_rm.args, unasked.
        parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:  # how HF's argument classes refuse a combination
        raise ConfigError(" ".join(str(error).split())) from error
    *instances, unknown = parsed
    if unknown:
        word = unknown[0].split("=")[0]
        raise ConfigError(f"unknown argument {word}{did_you_mean(word, [f'--{name}' for name in _actions(parser)])}")
    return tuple(instances)


class _Parser(TrlParser):
    def error(self, message: str):
        raise ConfigError(message.replace("argument --", "--") + ".")


def _split_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The configuration file among the words, if any, and the other words."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words and not words[0].startswith("-"):
        words.insert(0, "--config")
    if "--config" not in words:
        return None, words
    if words.count("--config") > 1:
        raise ConfigError("more than one configuration file is given: keep one.")
    position = words.index("--config")
    if position + 1 == len(words):
        raise ConfigError("--config needs a file: write --config training_configs/7b_config.yaml.")
    return Path(words[position + 1]), words[:position] + words[position + 2 :]


def _split_nulls(argv: Sequence[str], hints: dict[str, Any]) -> tuple[list[str], dict[str, None]]:
    """The words without `--key null` where no value is one for the key, and these keys."""
    words: list[str] = []
    nulls: dict[str, None] = {}
    for word in argv:
        flag, _, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        flag = flag or (words[-1] if words else "")
        key = flag.removeprefix("--")
        if value != "null" or not flag.startswith("--") or NoneType not in get_args(hints.get(key)):
            words.append(word)
            continue
        if "=" not in word:
            words.pop()
        nulls[key] = None
    return words, nulls


def _apply_file(path: Path, parser: _Parser, hints: dict[str, Any]) -> None:
    """Makes the file's values the parser's defaults, checked here because argparse checks no default."""
    content = load_file(path)
    environment = content.pop("env", {})
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: env must hold `NAME: value` lines.")
    actions = _actions(parser)
    for key, value in content.items():
        if key not in actions:
            raise ConfigError(f"{path}: unknown key {key!r}{did_you_mean(key, actions)}")
        content[key] = _value(f"{path}: {key}", value, actions[key], hints[key])
    if isinstance(content.get("deepspeed"), str):
        content["deepspeed"] = _find_deepspeed(path, content["deepspeed"])
    os.environ.update({name: str(value) for name, value in environment.items()})
    parser.set_defaults_with_config(**content)


def _value(where: str, value: Any, action: argparse.Action, hint: Any) -> Any:
    """What the command line would make of `value`, for a key of type `hint`."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members}
    if value is None:
        if NoneType not in kinds:
            raise ConfigError(f"{where} is empty: give it a value, or remove the line for its default.")
        return None
    if isinstance(value, dict):
        if dict not in kinds:
            raise ConfigError(f"{where} takes a value, not a mapping: remove the lines indented under it.")
        return value
    if isinstance(value, list):
        if list not in kinds:
            raise ConfigError(f"{where} takes one value, not a list.")
        return [_scalar(where, item, action) for item in value]
    value = _scalar(where, value, action)
    return [value] if list in kinds and str not in kinds else value


def _scalar(where: str, value: Any, action: argparse.Action) -> Any:
    word = str(value).lower() if isinstance(value, bool) else str(value)
    convert: Any = action.type
    try:
        converted = convert(word)
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        name = getattr(convert, "__name__", "value")
        raise ConfigError(f"{where} is {value!r}: it must be {WANTED.get(name, name)}.") from None
    if action.choices is not None and converted not in action.choices:
        raise ConfigError(f"{where} is {value!r}: choose from {', '.join(map(str, action.choices))}.")
    return converted


def _find_deepspeed(config: Path, name: str) -> str:
    """`deepspeed: zero2.json` is looked for where the program runs, then beside the configuration and above it."""
    folders = [Path(), config.parent, config.resolve().parent.parent]
    for folder in folders:
        if (folder / name).is_file():
            return str(folder / name)
    raise ConfigError(f"{config}: deepspeed is {name!r}, but there is no such file here or beside the configuration.")


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Each key's own action. `--no_KEY`, which HF adds for switches that are on, comes after it and is left out."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest != "help":
            actions.setdefault(action.dest, action)
    return actions
