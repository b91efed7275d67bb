"""Flow-Factory: any reward of vlmrm by dotted path; without Flow-Factory a reward of vlmrm itself.

    rewards:
      - name: people
        reward_model: vlmrm.adapters.flow_factory_reward.PointwiseReward   # or GroupwiseReward
        reward: vlm_reward        # the default, of GroupwiseReward vlm_reward_group; a name or dotted path
        model_path: outputs/best  # and other settings of that reward
        gathered_fields: [condition_images]  # where they belong to the prompt, and groups span ranks

Flow-Factory's advantages, `sum` and `gdpo`, are in `vlmrm.rewards.outcome`, in float64.
"""

from __future__ import annotations

import inspect
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards import reward_arguments, reward_model_class
from vlmrm.rewards.reward_set import FAILURES
from vlmrm.rewards.samples import CallResult, ContractError, Samples, call

if TYPE_CHECKING or find_spec("flow_factory") is None:
    from vlmrm.rewards import GroupwiseRewardModel, PointwiseRewardModel, RewardModelOutput
else:
    from flow_factory.rewards import GroupwiseRewardModel, PointwiseRewardModel, RewardModelOutput

logger = logging.getLogger("vlmrm")


class _FlowFactoryReward:
    """A reward of vlmrm, `inner`, with Flow-Factory's constructor and call."""

    default: str
    config: Any

    def __init__(self, config: Any, accelerator: Any):
        super().__init__(config, accelerator)  # ty: ignore[too-many-positional-arguments]
        extra = dict(config.extra_kwargs)
        if "deadline" in extra:
            raise ConfigError(f"reward {config.name}: deadline: Flow-Factory itself waits for rewards: leave it out.")
        gathered = extra.pop("gathered_fields", None) or ()
        if isinstance(gathered, str) or not set(gathered) <= {"condition_images", "condition_videos"}:
            raise ConfigError(
                f"reward {config.name}: gathered_fields is {gathered!r}: "
                "list condition_images, condition_videos or both."
            )
        inner = reward_model_class(str(extra.pop("reward", self.default)))
        common = {name: getattr(config, name) for name in ("name", "dtype", "device", "batch_size")}
        # Flow-Factory's default, whoever set it, would round the scores of a model that is finer.
        if inner.default_dtype != "bfloat16" and str(config.dtype).endswith("bfloat16"):
            del common["dtype"]
        path = f"{inner.__module__}.{inner.__qualname__}"
        [arguments] = reward_arguments({"reward_model": path, **common, **extra})
        if arguments.on_failure == "mask":
            raise ConfigError(
                f"reward {config.name}: on_failure is mask, and Flow-Factory has no missing rewards: choose raise, or "
                "fallback with a fallback_reward."
            )
        self.inner = inner(arguments, accelerator)
        self.model = self.inner.model
        self.fallback = arguments.fallback_reward
        # Flow-Factory gathers only these columns of a group that spans ranks. Its samples all have the attributes
        # image and video, None or not, but only some kinds of samples have conditions.
        named = inspect.signature(type(self.inner).__call__).parameters
        media = [name for name in ("image", "video") if name in named]
        self.required_fields = tuple(dict.fromkeys(("prompt", *self.inner.required_fields, *media, *gathered)))
        self.use_tensor_inputs = self.inner.use_tensor_inputs

    # Flow-Factory passes the columns that are named here: with **kwargs it would move every tensor of a sample.
    def __call__(self, prompt, image=None, video=None, condition_images=None, condition_videos=None, metadata=None):
        columns = {"prompt": prompt, "image": image, "video": video, "metadata": metadata}
        columns |= {"condition_images": condition_images, "condition_videos": condition_videos}
        try:
            result = call(self.inner, Samples(columns))
        except FAILURES as error:
            if isinstance(error, ContractError):
                raise
            result = CallResult(failures=dict.fromkeys(range(len(prompt)), str(error).rstrip(".")))
        if result.failures:
            index, reason = min(result.failures.items())
            message = f"reward {self.config.name}: sample {index}: {reason}"
            if self.fallback is None:
                raise RewardError(message)
            logger.warning("%s; %d of %d samples get fallback_reward", message, len(result.failures), len(prompt))
            result.rewards |= dict.fromkeys(result.failures, self.fallback)
        return RewardModelOutput(rewards=[result.rewards[index] for index in range(len(prompt))])


class PointwiseReward(_FlowFactoryReward, PointwiseRewardModel):  # ty: ignore[incompatible-method-override]
    default = "vlm_reward"


class GroupwiseReward(_FlowFactoryReward, GroupwiseRewardModel):  # ty: ignore[incompatible-method-override]
    default = "vlm_reward_group"
