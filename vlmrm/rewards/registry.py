"""Which class a reward's name stands for: built in, registered, of an installed package, or a dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from vlmrm.errors import ConfigError
from vlmrm.rewards.contract import BaseRewardModel, GroupwiseRewardModel, PointwiseRewardModel
from vlmrm.settings import did_you_mean

ENTRY_POINTS = "vlmrm.rewards"  # the group in which an installed package names its rewards

# Built-in rewards by lower-case name; imported when they are asked for, each with its own dependencies.
BUILT_IN: dict[str, str] = {
    "remote_pointwise": "vlmrm.rewards.remote.RemotePointwiseRewardModel",
    "remote_groupwise": "vlmrm.rewards.remote.RemoteGroupwiseRewardModel",
    "vlm_reward": "vlmrm.rewards.built_in.vlm_reward.VlmReward",
    "vlm_reward_group": "vlmrm.rewards.built_in.vlm_reward.VlmRewardGroup",
    "clip": "vlmrm.rewards.built_in.clip.CLIP",
    "pickscore": "vlmrm.rewards.built_in.clip.PickScore",
    "pickscore_rank": "vlmrm.rewards.built_in.clip.PickScoreRank",
    "hpsv2": "vlmrm.rewards.built_in.hps_v2.HPSv2",
    "image_reward": "vlmrm.rewards.built_in.image_reward.ImageReward",  # in cosmos-rl
    "imagereward": "vlmrm.rewards.built_in.image_reward.ImageReward",
    "hpsv3": "vlmrm.rewards.built_in.hps_v3.HPSv3",
    "dance_grpo": "vlmrm.rewards.built_in.video_align.VideoAlign",  # in cosmos-rl
    "videoalign": "vlmrm.rewards.built_in.video_align.VideoAlign",
    "ocr": "vlmrm.rewards.built_in.ocr.OCR",
    "gen_eval": "vlmrm.rewards.built_in.gen_eval.GenEval",
    "frame_success": "vlmrm.rewards.built_in.frame_success.FrameSuccess",
    "cosmos_reason1": "vlmrm.rewards.built_in.cosmos_reason1.CosmosReason1",
    "vllm_evaluate": "vlmrm.rewards.judges.yes_no.YesNo",
    "rational_rewards_t2i": "vlmrm.rewards.judges.rational_rewards.RationalRewardsT2I",
    "rational_rewards_edit": "vlmrm.rewards.judges.rational_rewards.RationalRewardsEdit",
    "unified_reward": "vlmrm.rewards.judges.unified_reward.UnifiedReward",
    "rubric": "vlmrm.rewards.judges.rubric.RubricJudge",
}
_registered: dict[str, type[BaseRewardModel]] = {}

Model = TypeVar("Model", bound=type[BaseRewardModel])


def register_reward_model(name: str) -> Callable[[Model], Model]:
    """A class decorator: from now on the class is found by `name`, in any case.

    Raises:
        ConfigError: when another reward has the name.
    """

    def register(cls: Model) -> Model:
        key = name.lower()
        other = _registered.get(key)
        # A module that is loaded anew registers its classes again.
        again = other is not None and (other.__module__, other.__qualname__) == (cls.__module__, cls.__qualname__)
        if key in BUILT_IN or (other is not None and not again):
            raise ConfigError(f"there is already a reward called {name}: register {cls.__name__} under another name.")
        _registered[key] = cls
        return cls

    return register


def reward_model_class(name: str) -> type[BaseRewardModel]:
    """The class that `name` stands for: a built-in or registered name, an entry point, or `module.Class`.

    Raises:
        ConfigError: when there is none, or it is no reward model.
        ImportError: as it is, when the reward's own module cannot be imported.
    """
    key = name.lower()
    found: object
    if key in _registered:
        found = _registered[key]
    elif key in BUILT_IN:
        found = _import(BUILT_IN[key])
    else:
        installed = {entry.name.lower(): entry for entry in entry_points(group=ENTRY_POINTS)}
        if key not in installed and "." not in name:
            known = [*_registered, *BUILT_IN, *installed]
            hint = did_you_mean(key, known, ": give a registered name or the dotted path of a class.")
            raise ConfigError(f"there is no reward {name}{hint}")
        found = installed[key].load() if key in installed else _import(name)
    if not isinstance(found, type) or not issubclass(found, (PointwiseRewardModel, GroupwiseRewardModel)):
        raise ConfigError(f"{name} is neither a PointwiseRewardModel nor a GroupwiseRewardModel: derive it from one.")
    return found


def _import(path: str) -> object:
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it needs is not
        raise ConfigError(f"there is no module {error.name}, which the reward {path} is in: check it.") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"the module {module_name} has no {attribute}, asked for as a reward: check it.") from None
