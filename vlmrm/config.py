"""Flat YAML and the command line → dataclasses, by TRL's parser, with errors that name the key and its neighbours.

CONFIG.yaml [--key value ...]        the command line beats the file, the file beats the defaults
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from vlmrm.errors import ConfigError


def parse(dataclasses: Sequence[type], argv: Sequence[str], program: str) -> tuple[Any, ...]:
    """Instances of `dataclasses` from `argv`, whose first word may be a YAML or JSON file (also `--config FILE`).

    Raises:
        ConfigError: for an unknown, duplicate or ill-typed key, naming the nearest key there is.
    """
    parser = _Parser(list(dataclasses), prog=program, allow_abbrev=False)
    argv = [word for token in argv for word in _split_equals(token)]
    if argv and not argv[0].startswith("-"):
        argv = ["--config", *argv]
    if "--config" in argv:
        position = argv.index("--config")
        if position + 1 == len(argv):
            raise ConfigError("--config needs a file: write --config training_configs/7b_config.yaml.")
        _check_file(Path(argv[position + 1]), parser)
    try:
        return parser.parse_args_and_config(argv)
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:  # how HF's argument classes refuse a combination
        raise ConfigError(_one_line(error, parser)) from error


class _Parser(TrlParser):
    def error(self, message: str):
        raise ConfigError(message.replace("argument --", "--"))


def _split_equals(token: str) -> list[str]:
    return token.split("=", 1) if token.startswith("--config=") else [token]


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word."""

    def construct_mapping(self, node, deep=False):
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise ConfigError(f"{self.name}: key {key!r} is on line {seen[key]} and on line {line}: remove one.")
            seen[key] = line
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; duplicate keys and anything else than a mapping are errors."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _UniqueKeyLoader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], 1)
        hint = f": did you mean {path.parent / near[0]}?" if near else "."
        raise ConfigError(f"there is no configuration file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold `key: value` lines.")
    return content


def _check_file(path: Path, parser: argparse.ArgumentParser) -> None:
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    for key, value in load_yaml(path).items():
        if key == "env":
            continue
        if key not in actions:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(str(key), list(actions))}")
        _check_value(path, key, value, actions[key])


def _check_value(path: Path, key: str, value: Any, action: argparse.Action) -> None:
    """Values of a file become argparse defaults, whose type nobody checks."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and action.nargs is None:
        raise ConfigError(f"{path}: {key} takes one value, not a list.")
    for item in values:
        if item is None or isinstance(item, dict):
            continue
        try:
            converted = action.type(str(item)) if callable(action.type) else item
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            name = getattr(action.type, "__name__", "value")
            raise ConfigError(f"{path}: {key} is {item!r}, which is not a {name}.") from None
        if action.choices is not None and converted not in action.choices:
            raise ConfigError(f"{path}: {key} is {item!r}: choose from {', '.join(map(str, action.choices))}.")


def _one_line(error: Exception, parser: argparse.ArgumentParser) -> str:
    message = " ".join(str(error).split())
    marker = "arguments are not used by the HfArgumentParser: "
    if marker in message:
        names = [action.dest for action in parser._actions]
        unknown = message.split(marker)[1].strip("[]").split(",")[0].strip("' ")
        return f"unknown argument {unknown}{_nearest(unknown.lstrip('-'), names, '--')}"
    return message


def _nearest(name: str, names: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    return f": did you mean {prefix}{near[0]}?" if near else "."
