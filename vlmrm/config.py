"""Flat YAML and the command line → dataclasses, by TRL's parser, with errors that name the key and suggest another.

CONFIG.yaml [--key value ...]        the command line beats the file, the file beats the defaults

A value in a file or a mapping is converted as on the command line. Importing this module does not import TRL.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from vlmrm.errors import ConfigError, DataError
from vlmrm.libraries import installed_version
from vlmrm.logs import say
from vlmrm.plugins import load_plugins, without_plugins
from vlmrm.settings import load_file, nearest, nearest_file

if TYPE_CHECKING:
    from trl import TrlParser

TYPE_NAMES = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}

ILL_TYPED = re.compile(r"argument ([^/:]+)\S*: invalid (\w+) value: (.*)", re.DOTALL)  # argparse's words

Kinds = Mapping[str, Set[Any]]  # of each key, the types that it takes
ENGINE_FILES = ("deepspeed", "fsdp_config")
NO_ENGINE = ("", "null", "none", "false", "no", "off")  # values of `deepspeed` that stand for null

DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
KEY_SIMILARITY = 0.65  # of an unknown key to the one that is suggested
# Keys of other frameworks whose names are far from ours.
OTHER_NAMES = {
    **dict.fromkeys(("model", "model_path", "model_id"), ("model_name_or_path", "model_dirs")),
    **dict.fromkeys(("data", "dataset", "dataset_name", "data_path", "train_file"), ("dataset_path",)),
    **dict.fromkeys(("eval_dataset", "val_dataset", "eval_file"), ("eval_dataset_path",)),
    **dict.fromkeys(("val_size", "split_dataset_ratio"), ("eval_fraction",)),
    **dict.fromkeys(("finetuning_type", "tuner_type", "train_type", "lora"), ("use_peft",)),
    **dict.fromkeys(("rank", "lora_rank"), ("lora_r",)),
    **dict.fromkeys(("cutoff_len", "max_len", "max_model_len"), ("max_seq_length",)),
    **dict.fromkeys(("batch_size", "train_batch_size"), ("per_device_train_batch_size",)),
    **dict.fromkeys(("lr",), ("learning_rate",)),
    **dict.fromkeys(("epochs", "num_epochs"), ("num_train_epochs",)),
    **dict.fromkeys(("torch_dtype", "precision"), ("dtype",)),
    **dict.fromkeys(("image_folder", "image_dir", "media_dir"), ("image_root",)),
    **dict.fromkeys(("output",), ("output_dir", "output_file")),
}

Configuration = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]


def parse(dataclasses: Sequence[Any], config: Configuration, program: str, **keys: Any) -> tuple[Any, ...]:
    """Return instances of `dataclasses` from a configuration, of which `keys` override some.

    Args:
        config: a YAML or JSON file, a mapping of keys to values, or the words of a command line, which may begin with
            a file (or `--config FILE`). It may hold two keys more: `env`, a mapping of environment variables to set,
            and `plugin`, the file or module to import first, or several.
        program: the command, for its usage.
    """
    parser = parser_of(dataclasses, program)
    hints = {name: hint for cls in dataclasses for name, hint in get_type_hints(cls).items()}
    values, environment, words = _read(config, keys, parser, {name: kinds_of(hint) for name, hint in hints.items()})
    os.environ.update({name: str(value) for name, value in environment.items()})
    parser.set_defaults_with_config(**values)
    try:
        # By default HF would also read a file train_rm.args.
        parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:  # HF's argument classes refuse a combination so
        raise ConfigError(" ".join(str(error).split())) from error
    *instances, unknown = parsed
    _refuse(unknown, parser)
    return tuple(instances)


def written_keys(config: Configuration) -> set[str]:
    """Return the keys of a configuration, of its file and its words, whatever their values."""
    content, path, words = _split(config)
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return {*content, *flags, *(flag.removeprefix("no_") for flag in flags), *(load_file(path) if path else ())}


def _split(config: Configuration) -> tuple[Mapping[str, Any], Path | None, list[str]]:
    """Return the mapping, the file and the words of a configuration."""
    if isinstance(config, Mapping):
        return config, None, []
    return {}, *_split_file([os.fspath(config)] if isinstance(config, (str, os.PathLike)) else config)


def read(parser: argparse.ArgumentParser, config: Configuration, kinds: Kinds) -> dict[str, Any]:
    """Return the keys of a configuration with their values, for `parse`; the `parser` of the keys has no defaults."""
    values, environment, words = _read(config, {}, parser, kinds)
    os.environ.update({name: str(value) for name, value in environment.items()})
    written, unknown = parser.parse_known_args(words)
    _refuse(unknown, parser)
    return values | vars(written)


def check_paths(values: Mapping[str, Any]) -> None:
    """Refuse paths of data that are not here; a name may also be one of the hub, or a pattern."""
    for name in (name for key in ("dataset_path", "eval_dataset_path") for name in values.get(key) or ()):
        here = name.startswith(("/", "./", "../")) or name.endswith(DATA_SUFFIXES)
        if here and not glob.has_magic(name) and "://" not in name and not Path(name).exists():
            raise DataError(f"{name} does not exist{nearest_file(Path(name))}")


def kinds_of(hint: Any) -> frozenset[Any]:
    """Return the types that a key takes: those of a union, `list` for `list[str]`."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return frozenset(get_origin(member) or member for member in members)


def _refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> None:
    if unknown:
        flags = [word.split("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
        raise ConfigError(_unknown("argument", flags, actions_of(parser), "--"))


def _unknown(noun: str, names: Sequence[str], keys: Collection[str], dashes: str = "") -> str:
    """Return the sentence about unknown keys, with what each is probably meant as."""
    shown = names if dashes else [repr(name) for name in names]

    def meant(name: str) -> str:
        plain = name.removeprefix("--").replace("-", "_")
        others = [key for key in OTHER_NAMES.get(plain, ()) if key in keys]
        near = others[0] if others else nearest(plain, keys, KEY_SIMILARITY)
        return f"did you mean {dashes}{near}?" if near else ""

    if len(names) == 1:
        return f"unknown {noun} {shown[0]}" + (f": {end}" if (end := meant(names[0])) else ".")
    listed = (f"{it} ({end})" if (end := meant(name)) else it for it, name in zip(shown, names, strict=True))
    return f"unknown {noun}s: {', '.join(listed)}."


def _read(
    config: Configuration, keys: Mapping[str, Any], parser: argparse.ArgumentParser, kinds: Kinds
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the converted values of the file or mapping and of `keys`, the environment, and the remaining words."""
    content, path, words = _split(config)
    values, environment = ({}, {}) if path is None else _converted(load_file(path), parser, kinds, path)
    more, set_too = _converted({**content, **keys}, parser, kinds)
    words, nulls = _split_nulls(without_plugins(words), kinds)
    return values | more | nulls, environment | set_too, words


class PlainErrors(argparse.ArgumentParser):
    """A parser whose errors are one sentence: argparse would print the usage, a hundred keys, and exit."""

    def error(self, message: str) -> NoReturn:
        if ill_typed := ILL_TYPED.match(message):
            flag, kind, value = ill_typed.groups()
            raise ConfigError(f"{flag} is {value}: it must be {TYPE_NAMES.get(kind, kind)}.")
        raise ConfigError(message.replace("argument --", "--") + ".")


def parser_of(dataclasses: Sequence[Any], program: str) -> TrlParser:
    from trl import TrlParser

    class Parser(PlainErrors, TrlParser):
        pass

    return Parser(list(dataclasses), prog=program, allow_abbrev=False)


def _split_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the configuration file among the words, if any, and the remaining words."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words and not words[0].startswith("-"):
        if words[0].endswith(DATA_SUFFIXES):
            raise ConfigError(f"{words[0]} holds data, and is no configuration: write --dataset_path {words[0]}.")
        words.insert(0, "--config")
    if "--config" not in words:
        return None, words
    if words.count("--config") > 1:
        raise ConfigError("more than one configuration file is given: keep one.")
    position = words.index("--config")
    if position + 1 == len(words):
        raise ConfigError("--config needs a file: write --config training_configs/7b_config.yaml.")
    return Path(words[position + 1]), words[:position] + words[position + 2 :]


def _split_nulls(argv: Sequence[str], kinds: Kinds) -> tuple[list[str], dict[str, None]]:
    """Return the words without `--key null` for keys that may be None, and those keys."""
    words: list[str] = []
    nulls: dict[str, None] = {}
    for word in argv:
        flag, _, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        flag = flag or (words[-1] if words else "")
        key = flag.removeprefix("--").replace("-", "_")
        if value != "null" or not flag.startswith("--") or NoneType not in kinds.get(key, ()):
            words.append(word)
            continue
        if "=" not in word:
            words.pop()
        nulls[key] = None
    return words, nulls


def _converted(
    content: dict[str, Any], parser: argparse.ArgumentParser, kinds: Kinds, path: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values, those of the file at `path`, as the command line would give them, and the environment."""
    where = "" if path is None else f"{path}: "
    environment = content.pop("env", {})
    if not isinstance(environment, dict):
        raise ConfigError(f"{where}env must hold `NAME: value` lines.")
    if plugins := content.pop("plugin", None):
        names = [str(name) for name in ([plugins] if isinstance(plugins, str) else plugins)]
        load_plugins([_find_beside(path, "plugin", name) if path and name.endswith(".py") else name for name in names])
    actions = actions_of(parser)
    if unknown := [key for key in content if key not in actions]:
        raise ConfigError(where + _unknown("key", unknown, actions))
    for key, value in content.items():
        content[key] = _value(f"{where}{key}", value, actions[key], kinds[key])
    for key in ENGINE_FILES:
        engine = content.get(key)
        if path is not None and isinstance(engine, str) and engine.lower() not in NO_ENGINE:
            content[key] = _find_beside(path, key, engine)
    return content, environment


def _value(where: str, value: Any, action: argparse.Action, kinds: Set[Any]) -> Any:
    """Convert `value` as the command line would, for a key of these kinds."""
    if value is None:
        if NoneType not in kinds:
            raise ConfigError(f"{where} is empty: give it a value, or remove the line for its default.")
        return None
    if isinstance(value, dict):
        if dict not in kinds:
            raise ConfigError(f"{where} takes a value, not a mapping: remove the lines indented under it.")
        return value
    if isinstance(value, (list, tuple)):
        if list not in kinds and action.nargs != "+":  # a mapping of the command line is words NAME=VALUE
            raise ConfigError(f"{where} takes one value, not a list.")
        return [_scalar(where, item, action) for item in value]
    value = _scalar(where, value, action)
    return [value] if list in kinds and str not in kinds else value


def _scalar(where: str, value: Any, action: argparse.Action) -> Any:
    if isinstance(value, str) and action.type is str and action.choices is None:
        return value  # also a data set in memory, which is a name
    word = str(value).lower() if isinstance(value, bool) else str(value)
    convert: Any = action.type
    try:
        converted = convert(word)
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        name = getattr(convert, "__name__", "value")
        raise ConfigError(f"{where} is {value!r}: it must be {TYPE_NAMES.get(name, name)}.") from None
    if action.choices is not None and converted not in action.choices:
        raise ConfigError(f"{where} is {value!r}: choose from {', '.join(map(str, action.choices))}.")
    return converted


def _find_beside(config: Path, key: str, name: str) -> str:
    """Return the path of a file from the working directory, the configuration's folder or its parent."""
    for folder in (Path(), config.parent, config.resolve().parent.parent):
        if (folder / name).is_file():
            return str(folder / name)
    raise ConfigError(f"{config}: {key} is {name!r}, but there is no such file here or beside the configuration.")


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the action of each key, without the `--no_KEY` that HF adds after the action of a switch that is on."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest != "help":
            actions.setdefault(action.dest, action)
    return actions


# The declared keys ---------------------------------------------------------------------------------------------------
# The classes that own the keys of `vlmrm train` and `eval` import torch, which takes seconds. `docs/reference.py`
# writes what help and a check of a configuration need into keys.json; a test compares it with the classes.

FILE = Path(__file__).with_name("keys.json")
HELP, HELP_ALL = ("--help", "-h"), "--help-all"
SWITCH = ("true", "yes", "t", "y", "1", "false", "no", "f", "n", "0")  # as HF's string_to_bool reads them
KINDS: dict[str, Any] = {"none": NoneType, "list": list, "dict": dict, "str": str}
SAME_KEYS = {"plan": "train", "calibrate": "eval"}
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
