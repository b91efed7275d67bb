"""Settings files: reading, validation, and messages about mistakes in them."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml.constructor import ConstructorError

from vlmrm.errors import ConfigError


class Strict(BaseModel):
    """A pydantic model that refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


Settings = TypeVar("Settings", bound=BaseModel)


def key(default: Any, meaning: str, choices: Sequence[str] | None = None, **more: Any) -> Any:
    """Return a field of a dataclass of configuration keys, with the metadata that HF's argument parser reads."""
    metadata: dict[str, Any] = {"help": meaning, **more} | ({"choices": list(choices)} if choices else {})
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_least(values: Any, least: float, *names: str) -> None:
    """Refuse a number among the attributes `names` that is below `least`, NaN or infinite; None is no number."""
    for name in names:
        if (value := getattr(values, name)) is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} is {value}: it must be at least {least}.")


# Files ---------------------------------------------------------------------------------------------------------------


def load_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a TOML, JSON or (any other suffix) YAML file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}{nearest_file(path, '.')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}.") from error
    kind = {".json": "JSON", ".toml": "TOML"}.get(path.suffix.lower(), "YAML")
    try:
        if kind == "TOML":
            content = tomllib.loads(text)
        elif kind == "JSON":
            content = json.loads(text, object_pairs_hook=_unique_pairs)
        else:
            content = yaml.load(text, _Loader)
    except _DuplicateKey as error:
        raise ConfigError(f"{path}: {error}: remove one.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # errors of JSON and TOML are ValueErrors
        raise ConfigError(f"{path} is not valid {kind}: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold `key: value` lines.")
    return content


class _DuplicateKey(Exception):
    pass


class _Loader(yaml.SafeLoader):
    """Load YAML without duplicate keys (PyYAML keeps the last silently), and with the scalars of YAML 1.2.

    PyYAML reads YAML 1.1: it takes `save_strategy: no` for false and `1e-5` for text.
    """

    def construct_mapping(self, node, deep=False):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
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


# Validation ----------------------------------------------------------------------------------------------------------


def validate(kind: type[Settings], content: Mapping[str, Any], where: str, *, secret: bool = False) -> Settings:
    """Return `content` as an instance of the model `kind`; errors begin with `where`, and hide a `secret` value."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_errors(error.errors(), kind, values=not secret)}.") from None


def describe_errors(errors: Sequence[Any], kind: type[BaseModel] | None = None, *, values: bool = False) -> str:
    """Return the first of pydantic's `errors` in words.

    Of the model `kind` keys are suggested for a mistyped one, and `options`, where it has some, for another. `values`,
    which may be secrets or images, are told.
    """
    # An unknown key before any other, as a typo in it explains why one is missing.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    path = ".".join(str(part)[:40] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *block, key = first["loc"]
        keys = _keys(kind, block)
        near = nearest(key, keys) or (f"options.{key}" if "options" in keys else None)
        return f"unknown key {path}" + (f" (did you mean {near}?)" if near else "")
    if first["type"] == "missing":
        return f"{path} is missing"
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    value = f" (it is {first['input']!r})" if values and first["type"] != "value_error" else ""
    return f"{path}: {reason}{value}" if path else reason


def _keys(kind: Any, block: Sequence[int | str]) -> list[str]:
    """Return the keys of the model at the path `block` within `kind`; none if there is no model."""
    for part in block:
        if isinstance(part, str) and kind is not None:
            field = kind.model_fields.get(part)
            kind = None if field is None else model_in(field.annotation)
    return [] if kind is None else list(kind.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of an annotation such as `list[Model]` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := model_in(argument)) is not None), None)


# Suggestions ---------------------------------------------------------------------------------------------------------


def nearest(name: object, names: Iterable[str], similarity: float = 0.5) -> str | None:
    """Return the most similar of `names`; None if the similarity of all, 0 to 1, is below `similarity`."""
    return next(iter(difflib.get_close_matches(str(name), list(names), 1, similarity)), None)


def did_you_mean(name: object, names: Iterable[str], otherwise: str = ".") -> str:
    """Return the end of a sentence about an unknown name: a suggestion, or `otherwise`."""
    near = nearest(name, names)
    return f": did you mean {near}?" if near else otherwise


def nearest_file(path: Path, otherwise: str = "") -> str:
    """Return the end of a sentence about a missing file: the nearest name in its folder, or `otherwise`."""
    near = nearest(path.name, [file.name for file in path.parent.glob("*")], 0.6)
    return f": did you mean {path.parent / near}?" if near else otherwise
