"""The `rewards:` and `eval_rewards:` blocks of a YAML file, or the same as Python, into `RewardArguments`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from vlmrm.errors import ConfigError
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.registry import reward_model_class
from vlmrm.settings import load_file, nearest

logger = logging.getLogger("vlmrm")

FIELDS = tuple(each.name for each in fields(RewardArguments))
Config = str | Path | Mapping[str, Any] | Sequence[Any]


def reward_arguments(config: Config, block: str = "rewards") -> list[RewardArguments]:
    """The rewards of a configuration.

    Args:
        config: a YAML file, a mapping with the key `rewards` (and `eval_rewards`), or what stands under such a key:
            one mapping a reward, or the mapping alone where there is one reward.
        block: `rewards` or `eval_rewards`; without `eval_rewards` the training's are meant.

    Raises:
        ConfigError: for an unknown or ill-typed key, a name that is there twice, or no reward at all.
    """
    given = _block(config, block)
    items = [given] if isinstance(given, Mapping) else given
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)) or not items:
        raise ConfigError(f"{block} must hold one or more rewards, each with a name and a reward_model.")
    found = [item if isinstance(item, RewardArguments) else _arguments(item, block) for item in items]
    names = [arguments.name for arguments in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{block}: {names.count(name)} rewards are called {name}: give each its own name.")
    return found


def identity(arguments: RewardArguments) -> str:
    """What decides a reward model's results: two rewards with the same identity share one model."""
    model = reward_model_class(str(arguments.reward_model))
    decides = [
        f"{model.__module__}.{model.__qualname__}",
        str(arguments.dtype),
        str(arguments.device),
        arguments.extra_kwargs,
    ]
    return json.dumps(decides, sort_keys=True, default=_told)


def _told(value: Any) -> str | int:
    return hash(value) if isinstance(value, SecretStr) else repr(value)  # every secret has the same repr


def _block(config: Config, block: str) -> Any:
    if isinstance(config, (str, Path)):
        config = load_file(Path(config))
    if isinstance(config, Mapping) and not set(config) & set(FIELDS):
        unknown = [key for key in config if key not in ("rewards", "eval_rewards")]
        for key in unknown:
            if near := nearest(key, ("rewards", "eval_rewards"), 0.8):
                raise ConfigError(f"unknown key {key!r}: did you mean {near}?")
        if "rewards" not in config:
            raise ConfigError("there is no block rewards in the configuration: give at least one reward.")
        return config["rewards"] if config.get(block) is None else config[block]
    return config


def _arguments(item: Any, block: str) -> RewardArguments:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{block}: {item!r} is no reward: write a mapping with name and reward_model.")
    known = {key: value for key, value in item.items() if key in FIELDS and key != "extra_kwargs"}
    loose = {key: value for key, value in item.items() if key not in FIELDS}
    where = f"{block}: reward {item.get('name', 'default')}"
    explicit = item.get("extra_kwargs") or {}
    if not isinstance(explicit, Mapping):
        raise ConfigError(f"{where}: extra_kwargs must be a mapping.")
    if known.get("reward_model") is None:
        raise ConfigError(f"{where} has no reward_model: name one, or remove the reward.")
    known.setdefault("dtype", reward_model_class(str(known["reward_model"])).default_dtype)
    extra = {**loose, **explicit}
    _check_extra(where, loose, extra, known["reward_model"])
    return RewardArguments(**known, extra_kwargs=extra)


def _check_extra(where: str, loose: Mapping[str, Any], extra: Mapping[str, Any], model: Any) -> None:
    """A misspelt key must not become a setting that nobody reads."""
    options = reward_model_class(str(model)).options
    names = (*FIELDS, *(options or ()))
    for key in extra if options is not None else loose:
        near = nearest(key, names, 0.8)
        if options is None and near is None:
            logger.info("%s: %s is handed to %s as it is, which does not say what it takes", where, key, model)
        elif options is None or key not in options:
            hint = f"did you mean {near}?" if near else f"{model} takes {', '.join(options or ()) or 'no more keys'}."
            raise ConfigError(f"{where}: unknown key {key!r}: {hint}")
