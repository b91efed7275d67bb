"""Names of rewards and their classes, and configurations of rewards as `RewardArguments`."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr

from vlmrm.errors import ConfigError
from vlmrm.libraries import ROBOTS, install_command, needs
from vlmrm.plugins import imported_function, load_plugins
from vlmrm.rewards.contract import BaseRewardModel, GroupwiseRewardModel, PointwiseRewardModel, RewardArguments
from vlmrm.settings import did_you_mean, load_file, nearest

logger = logging.getLogger("vlmrm")

FIELDS = tuple(field.name for field in fields(RewardArguments))
Config = str | Path | Mapping[str, Any] | Sequence[Any]
ENTRY_POINTS = "vlmrm.rewards"  # the group in which an installed package names its rewards

# Built-in rewards by lower-case name; each is imported on first use, as its dependencies may be missing.
BUILT_IN: dict[str, str] = {
    "remote_pointwise": "vlmrm.rewards.remote.RemotePointwiseRewardModel",
    "remote_groupwise": "vlmrm.rewards.remote.RemoteGroupwiseRewardModel",
    "vlm_reward": "vlmrm.rewards.built_in.vlm_reward.VlmReward",
    "vlm_reward_group": "vlmrm.rewards.built_in.vlm_reward.VlmRewardGroup",
    "vlm_reward_ensemble": "vlmrm.rewards.built_in.vlm_reward.VlmRewardEnsemble",
    "clip": "vlmrm.rewards.built_in.clip.CLIP",
    "pickscore": "vlmrm.rewards.built_in.clip.PickScore",
    "pickscore_rank": "vlmrm.rewards.built_in.clip.PickScoreRank",
    "hpsv2": "vlmrm.rewards.built_in.clip.HPSv2",
    "aesthetic": "vlmrm.rewards.built_in.clip.Aesthetic",
    "image_reward": "vlmrm.rewards.built_in.image_reward.ImageReward",  # in cosmos-rl
    "imagereward": "vlmrm.rewards.built_in.image_reward.ImageReward",
    "hpsv3": "vlmrm.rewards.built_in.reward_tokens.HPSv3",
    "dance_grpo": "vlmrm.rewards.built_in.reward_tokens.VideoAlign",  # in cosmos-rl
    "videoalign": "vlmrm.rewards.built_in.reward_tokens.VideoAlign",
    "ocr": "vlmrm.rewards.built_in.ocr.OCR",
    "format": "vlmrm.rewards.built_in.texts.Format",
    "repetition": "vlmrm.rewards.built_in.texts.Repetition",
    "jpeg_compressibility": "vlmrm.rewards.built_in.texts.JpegCompressibility",
    "jpeg_incompressibility": "vlmrm.rewards.built_in.texts.JpegIncompressibility",
    "gen_eval": "vlmrm.rewards.built_in.gen_eval.GenEval",
    "cosmos_reason1": "vlmrm.rewards.built_in.cosmos_reason1.CosmosReason1",
    "vllm_evaluate": "vlmrm.rewards.judges.pointwise.YesNo",
    "rational_rewards_t2i": "vlmrm.rewards.judges.pointwise.RationalRewardsT2I",
    "rational_rewards_edit": "vlmrm.rewards.judges.pointwise.RationalRewardsEdit",
    "edit_score": "vlmrm.rewards.judges.pointwise.EditScore",
    "unified_reward": "vlmrm.rewards.judges.pointwise.UnifiedReward",
    "pairwise_judge": "vlmrm.rewards.judges.pairwise.PairwiseJudge",
    "rubric": "vlmrm.rewards.judges.rubric.RubricJudge",
}
OF_ROBOTS = ("robometer", "topreward", "frame_success", "robo_reward")  # entry points of vlmrm-robots
_registered: dict[str, type[BaseRewardModel]] = {}

Model = TypeVar("Model", bound=type[BaseRewardModel])


def register_reward_model(name: str) -> Callable[[Model], Model]:
    """Return a class decorator that registers the class under `name`, in any case.

    @register_reward_model("width")
    class Width(PointwiseRewardModel): ...
    """

    def register(cls: Model) -> Model:
        key = name.lower()
        taken = _registered.get(key, cls)
        # A reloaded module registers its classes again.
        same = (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
        if key in BUILT_IN or key in OF_ROBOTS or not same:
            raise ConfigError(f"there is already a reward called {name}: register {cls.__name__} under another name.")
        _registered[key] = cls
        return cls

    return register


def reward_model_class(name: str) -> type[BaseRewardModel]:
    """Return the class of a built-in or registered name, an entry point, or a dotted path `module.Class`."""
    key = name.lower()
    if key not in _registered and key not in BUILT_IN:  # in a process that was started afresh
        load_plugins()
    cls: object
    if key in _registered:
        cls = _registered[key]
    elif key in BUILT_IN:
        with needs("rewards", f"the reward {name}"):
            module, _, attribute = BUILT_IN[key].rpartition(".")
            cls = getattr(importlib.import_module(module), attribute)
    else:
        installed = {entry.name.lower(): entry for entry in entry_points(group=ENTRY_POINTS)}
        if key in OF_ROBOTS:
            if key not in installed:
                raise ConfigError(f"the reward {name} needs {ROBOTS}: {install_command(ROBOTS)}.")
            with needs(f"{ROBOTS}[vlm]", f"the reward {name}"):
                cls = installed[key].load()
        elif key not in installed and "." not in name:
            names = [*_registered, *BUILT_IN, *OF_ROBOTS, *installed]
            hint = did_you_mean(key, names, ": give a registered name or the dotted path of a class.")
            raise ConfigError(f"there is no reward {name}{hint}")
        else:
            module, _, attribute = name.rpartition(".")
            subject = f"the reward {name}"
            cls = installed[key].load() if key in installed else imported_function(module, attribute, subject)
    if not isinstance(cls, type) or not issubclass(cls, (PointwiseRewardModel, GroupwiseRewardModel)):
        raise ConfigError(f"{name} is neither a PointwiseRewardModel nor a GroupwiseRewardModel: derive it from one.")
    return cls


def reward_arguments(config: Config, block: str = "rewards") -> list[RewardArguments]:
    """Parse the `rewards` or `eval_rewards` of a configuration.

    Args:
        config: a YAML file, a mapping with the key `rewards` (and `eval_rewards`), or the value of such a key: one
            mapping a reward, or the mapping alone where there is one reward.
        block: `rewards` or `eval_rewards`; without `eval_rewards` those of training are returned.
    """
    block_config = _block(config, block)
    items = [block_config] if isinstance(block_config, Mapping) else block_config
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)) or not items:
        raise ConfigError(f"{block} must hold one or more rewards, each with a name and a reward_model.")
    rewards = [item if isinstance(item, RewardArguments) else _arguments(item, block) for item in items]
    names = [arguments.name for arguments in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{block}: {names.count(name)} rewards are called {name}: give each its own name.")
    return rewards


def identity(arguments: RewardArguments) -> str:
    """Return a key of all that decides a reward's results: rewards with equal keys share one model."""

    def comparable(value: Any) -> str | int:
        return hash(value) if isinstance(value, SecretStr) else repr(value)  # every secret has the same repr

    model = reward_model_class(str(arguments.reward_model))
    decides = [model.__module__, model.__qualname__, str(arguments.dtype), str(arguments.device)]
    return json.dumps([*decides, arguments.extra_kwargs], sort_keys=True, default=comparable)


def _block(config: Config, block: str) -> Any:
    if isinstance(config, (str, Path)):
        config = load_file(Path(config))
    if isinstance(config, Mapping) and not set(config) & set(FIELDS):
        for key in config.keys() - {"rewards", "eval_rewards"}:
            if near := nearest(key, ("rewards", "eval_rewards"), 0.8):
                raise ConfigError(f"unknown key {key!r}: did you mean {near}?")
        if "rewards" not in config:
            raise ConfigError("there is no block rewards in the configuration: give at least one reward.")
        return config["rewards"] if config.get(block) is None else config[block]
    return config


def _arguments(item: Any, block: str) -> RewardArguments:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{block}: {item!r} is no reward: write a mapping with name and reward_model.")
    settings = {key: value for key, value in item.items() if key in FIELDS}
    loose = {key: value for key, value in item.items() if key not in FIELDS}
    where = f"{block}: reward {item.get('name', 'default')}"
    extra_kwargs = settings.pop("extra_kwargs", None) or {}
    if not isinstance(extra_kwargs, Mapping):
        raise ConfigError(f"{where}: extra_kwargs must be a mapping.")
    if settings.get("reward_model") is None:
        raise ConfigError(f"{where} has no reward_model: name one, or remove the reward.")
    model = reward_model_class(str(settings["reward_model"]))
    settings.setdefault("dtype", model.default_dtype)
    extra = {**loose, **extra_kwargs}
    if settings.get("deadline") is not None and "deadline" in (model.options or ()):
        extra.setdefault("deadline", settings["deadline"])  # a judge's own, of a call
        if not settings.get("async_reward"):
            del settings["deadline"]
    # A misspelt key would become a setting that nothing reads.
    name, options = settings["reward_model"], model.options
    for key in loose if options is None else [key for key in extra if key not in options]:
        near = nearest(key, (*FIELDS, *(options or ())), 0.8)
        if options is None and near is None:
            logger.info("%s: %s is handed to %s as it is, which does not say what it takes", where, key, name)
            continue
        hint = f"did you mean {near}?" if near else f"{name} takes {', '.join(options or ()) or 'no more keys'}."
        raise ConfigError(f"{where}: unknown key {key!r}: {hint}")
    return RewardArguments(**settings, extra_kwargs=extra)
