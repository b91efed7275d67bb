"""Flat YAML and the command line → dataclasses, by TRL's parser, with errors that name the key and its neighbours.

CONFIG.yaml [--key value ...]        the command line beats the file, the file beats the defaults

A value in a file means what the same word means on the command line: one rule for both.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from vlmrm.errors import ConfigError

WANTED = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}


def parse(dataclasses: Sequence[Any], argv: Sequence[str], program: str) -> tuple[Any, ...]:
    """Instances of `dataclasses` from `argv`, whose first word may be a YAML or JSON file (also `--config FILE`).

    A file may also hold `env:`, a mapping of environment variables to set.

    Raises:
        ConfigError: for an unknown, duplicate or ill-typed key, naming the nearest key there is.
    """
    parser = _Parser(list(dataclasses), prog=program, allow_abbrev=False)
    path, words = _split_file(argv)
    if path is not None:
        hints = {name: hint for cls in dataclasses for name, hint in get_type_hints(cls).items()}
        _apply_file(path, parser, hints)
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
        raise ConfigError(f"unknown argument {word}{_nearest(word.lstrip('-'), _actions(parser), '--')}")
    return tuple(instances)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        ConfigError: for a file that cannot be read, holds a key twice, or holds anything else than a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], 1)
        hint = f": did you mean {path.parent / near[0]}?" if near else "."
        raise ConfigError(f"there is no configuration file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}.") from error
    try:
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=_unique_pairs)
        else:
            content = yaml.load(text, _Loader)
    except _DuplicateKey as error:
        raise ConfigError(f"{path}: {error}: remove one.") from None
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path} is not valid {kind}: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold `key: value` lines.")
    return content


class _Parser(TrlParser):
    def error(self, message: str):
        raise ConfigError(message.replace("argument --", "--") + ".")


class _DuplicateKey(Exception):
    pass


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML keeps the last, and reads scalars as YAML 1.2 does.

    PyYAML's YAML 1.1 takes `save_strategy: no` for false and `1e-5` for text.
    """

    def construct_mapping(self, node, deep=False):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _DuplicateKey(f"key {key.value!r} is on line {lines[key.value]} and on line {line}")
            lines[str(key.value)] = line
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    [*"-+.0123456789"],
)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _DuplicateKey(f"key {name!r} is there {names.count(name)} times")
    return dict(pairs)


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


def _apply_file(path: Path, parser: _Parser, hints: dict[str, Any]) -> None:
    """Makes the file's values the parser's defaults, checked here because argparse checks no default."""
    content = load_yaml(path)
    environment = content.pop("env", {})
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: env must hold `NAME: value` lines.")
    actions = _actions(parser)
    for key, value in content.items():
        if key not in actions:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(str(key), actions)}")
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


def _nearest(name: str, names: Sequence[str] | dict[str, Any], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(names), 1, cutoff=0.5)
    return f": did you mean {prefix}{near[0]}?" if near else "."
