"""The contract of a reward: its settings, its two kinds, its call and its output.

Names, fields, defaults and the call signature are Flow-Factory's, so that a reward written for Flow-Factory runs here
once its import lines are changed.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, Field, SecretStr, create_model

from vlmrm.errors import ConfigError, RewardError
from vlmrm.files import read_wording
from vlmrm.libraries import parse_device, parse_dtype
from vlmrm.settings import Strict, validate

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, PartialState

Processes: TypeAlias = "Accelerator | PartialState | None"
PLACEHOLDER = "{text_prompt}"  # of the prompt in a template_file
FREE = ("reward_model", "dtype", "device", "extra_kwargs")  # settings that have types of their own
CREDENTIALS = re.compile(r"://[^/?#\s'\"]*@")  # of an address

Range = Annotated[list[float], Field(min_length=2, max_length=2)]  # lowest and highest
Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=0)]


@dataclass
class RewardArguments:
    """The settings of one reward.

    Settings of a model's own (`server_url`, `aspects`, ...) are in `extra_kwargs`, and readable as attributes.

        RewardArguments("beauty", "aesthetic", weight=0.5, on_failure="mask")

    Args:
        name: the reward's name in results, metrics and errors; unique in a configuration.
        reward_model: a registered name, in any case, or the dotted path of a class.
        weight: factor in the aggregation.
        dtype: of the weights: bfloat16, float16 or float32; of a model trained here also auto, its checkpoint's. A
            torch.dtype, or the name where torch is not installed.
        device: `cuda` is the process's own device, whatever it is; anything else is taken as it is.
        batch_size: samples in a call of a pointwise model, of a judge at least its `max_concurrent`, and in a
            groupwise model's own batches.
        async_reward: compute on threads while samples are still being generated.
        num_workers: concurrent calls of an asynchronous reward.
        on_failure: `raise`; `mask`: a failed sample's reward is NaN, and neutral in the aggregation; `fallback`: it is
            `fallback_reward`, and counted.
        fallback_reward: required for `fallback`, whatever it means in the run.
        valid: [lowest, highest]: a reward outside is a failure, as of a judge that leaves its scale.
        clip: [lowest, highest]: a reward outside is that bound, after the penalties.
        uncertainty_penalty: factor of the std that the model tells of its reward, subtracted.
        length_penalty: subtracted for each word of the response after `length_free`.
        length_free: words without a penalty.
        deadline: seconds that a round waits for an asynchronous reward, from the last sample on; what has not come
            then has failed. Of a judge, synchronous or not, also the seconds of one call.
        max_missing: share of a round; where more of the samples fail in three rounds in a row, the reward is gone, and
            the run ends with the first error, whatever `on_failure` says.
    """

    name: Annotated[str, Field(min_length=1)] = "default"
    reward_model: str | None = None
    weight: float = 1.0
    dtype: str | torch.dtype = "bfloat16"
    device: str | torch.device = "cuda"
    batch_size: Count = 16
    async_reward: bool = False
    num_workers: Count = 1
    on_failure: Literal["raise", "mask", "fallback"] = "raise"
    fallback_reward: float | None = None
    valid: Range | None = None
    clip: Range | None = None
    uncertainty_penalty: Penalty = 0.0
    length_penalty: Penalty = 0.0
    length_free: Annotated[int, Field(ge=0)] = 0
    deadline: Annotated[float, Field(gt=0)] | None = None
    max_missing: Annotated[float, Field(ge=0, le=1)] = 0.5
    extra_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        where = f"reward {self.name}"
        # A configuration is YAML, where `weight: "1"` or `batch_size: 2.5` would be noticed much later.
        validate(_rules(), {name: getattr(self, name) for name in _rules().model_fields}, where)
        torch: Any = _torch()
        try:
            if torch is None or not isinstance(self.dtype, torch.dtype):
                name = parse_dtype(str(self.dtype), auto=True)
                self.dtype = name if torch is None or name == "auto" else getattr(torch, name)
            self.device = self.device if torch is None else torch.device(self.device)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except RuntimeError:
            raise ConfigError(f"{where}: device is {self.device!r}: write cuda, cuda:1 or cpu.") from None
        if (self.on_failure == "fallback") != (self.fallback_reward is not None):
            raise ConfigError(f"{where}: on_failure: fallback and fallback_reward go together: give both or neither.")
        for setting, bounds in (("valid", self.valid), ("clip", self.clip)):
            if bounds is not None and not bounds[0] < bounds[1]:
                raise ConfigError(f"{where}: {setting} is {bounds}: write the lowest and the highest reward.")
        if self.length_free and not self.length_penalty:
            raise ConfigError(f"{where}: length_free is a part of length_penalty: give that too.")
        for setting, default in (("deadline", None), ("num_workers", 1)):
            if getattr(self, setting) != default and not self.async_reward:
                raise ConfigError(f"{where}: {setting} is of asynchronous rewards: set async_reward: true.")
        if isinstance(self.extra_kwargs.get("api_key"), str):  # configurations are logged and uploaded
            self.extra_kwargs = {**self.extra_kwargs, "api_key": SecretStr(self.extra_kwargs["api_key"])}

    def __repr__(self) -> str:
        """Leave out the credentials of addresses, such as `server_url` may hold."""
        values = ", ".join(f"{setting.name}={getattr(self, setting.name)!r}" for setting in fields(self))
        return CREDENTIALS.sub("://***@", f"RewardArguments({values})")

    def __getattr__(self, name: str) -> Any:
        # Through __dict__: copying and unpickling look attributes up before there are any.
        extra = self.__dict__.get("extra_kwargs", {})
        if name in extra:
            return extra[name]
        raise AttributeError(f"reward {self.__dict__.get('name')} has no setting {name}: give it in its configuration")


@cache
def _rules() -> type[BaseModel]:
    """Return the types and bounds of the fields that are no names of types or devices."""
    checked = [each for each in fields(RewardArguments) if each.name not in FREE]
    rules: dict[str, Any] = {each.name: (each.type, ...) for each in checked}
    return create_model("Rules", __base__=Strict, __module__=__name__, __cls_kwargs__={"strict": True}, **rules)


def _torch() -> Any:
    """Return torch, or None where it is not installed: a client of judges and servers does without."""
    return importlib.import_module("torch") if find_spec("torch") else None


@dataclass(frozen=True)
class Verdict:
    """What a reward model says of one sample: a reward, details for the audit log, and why there is none."""

    reward: float = math.nan
    details: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class RewardModelOutput:
    """The rewards of one call, in the order of the samples.

    RewardModelOutput([0.5, 0.0], failures={1: "its image is blank"})
    """

    rewards: torch.Tensor | np.ndarray | list[float]  # one finite number a sample: [N]
    extra_info: dict[str, Any] | None = None  # details for the audit log, where a list of N is split by sample
    failures: Mapping[int, str] = field(default_factory=dict)  # why samples, by index, have none: numbers are ignored

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> RewardModelOutput:
        """Return the verdicts on all samples of a call as its output."""
        names = dict.fromkeys(name for verdict in verdicts for name in verdict.details)
        info = {name: [verdict.details.get(name) for verdict in verdicts] for name in names}
        failures = {index: it.failure for index, it in enumerate(verdicts) if it.failure is not None}
        return cls([verdict.reward for verdict in verdicts], info, failures)

    @classmethod
    def each(cls, judge: Callable[..., Verdict], *columns: Sequence[Any]) -> RewardModelOutput:
        """Return the output by a call of `judge` with each sample; one for which it raises RewardError fails."""
        verdicts = []
        for values in zip(*columns, strict=True):
            try:
                verdicts.append(judge(*values))
            except RewardError as error:
                verdicts.append(Verdict(failure=str(error)))
        return cls.of(verdicts)


def choice(arguments: RewardArguments, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Return a setting that is one of a few words; raise ConfigError naming the reward and the words."""
    value = arguments.extra_kwargs.get(name, default)
    if value not in choices:
        raise ConfigError(f"reward {arguments.name}: {name} is {value!r}: choose from {', '.join(choices)}.")
    return value


class BaseRewardModel(ABC):
    """The common part of both kinds: `config`, `device`, `dtype`, `accelerator`, and the inputs that a class declares.

    Every sample must have the `required_fields`, but where both `image` and `video` are required and `__call__` has
    None as their default, one of them is enough; other media that `__call__` names are passed where there are any.
    """

    required_fields: tuple[str, ...] = ("prompt", "image")
    use_tensor_inputs: bool = False
    text_prompts: ClassVar[bool] = False  # a sample whose prompt is messages fails; where all of a round do, it ends
    message_responses: ClassVar[bool] = False  # `response` may show an image or video; without it such a sample fails
    options: ClassVar[tuple[str, ...] | None] = None  # names of the extra settings; None accepts any
    deterministic: bool = True  # False for rewards that must be computed anew where a cached result would be used
    default_dtype: ClassVar[str] = "bfloat16"  # of a configuration that names none; `auto` for a model trained here

    def __init__(self, config: RewardArguments, accelerator: Processes):
        self.config = config
        self.accelerator = accelerator
        self.device: Any = config.device
        torch = _torch()
        if torch is not None:
            is_default = config.device == torch.device("cuda")
            try:
                self.device = parse_device(getattr(accelerator, "device", None) if is_default else config.device)
            except ConfigError as error:
                raise ConfigError(f"reward {config.name}: {error}") from None
        if config.dtype == "auto" != self.default_dtype:
            raise ConfigError(f"reward {config.name}: dtype is auto: choose from bfloat16, float16, float32.")
        self.dtype: Any = config.dtype
        self.model: Any = None

    @property
    def samples_a_call(self) -> int:
        """Return the most samples of a call of a pointwise model."""
        return self.config.batch_size

    def to(self, device: str | torch.device) -> BaseRewardModel:
        """Move `model`, where there is one."""
        self.device = _torch().device(device)
        if self.model is not None:
            self.model.to(self.device)
        return self

    def with_config(self, config: RewardArguments) -> BaseRewardModel:
        """Return the same model, sharing its weights, under the settings of another name."""
        model = copy.copy(self)
        model.config = config
        return model

    def counters(self) -> dict[str, float]:
        """Return counts since the model was loaded, by name, for a tracker."""
        return {}

    @abstractmethod
    def __call__(
        self,
        prompt: list[str],
        image: list[Any] | None = None,
        video: list[Any] | None = None,
        condition_images: list[Any] | None = None,
        condition_videos: list[Any] | None = None,
        **kwargs: Any,
    ) -> RewardModelOutput:
        """Score N samples; every argument is a list of N.

        Images are PIL, videos lists of PIL frames, conditions lists of those. With `use_tensor_inputs` an image is a
        float tensor (C, H, W) in [0, 1], a video (T, C, H, W), and conditions are (N, C, H, W) or (N, T, C, H, W)
        where they have one size, else a list.
        """


class PointwiseRewardModel(BaseRewardModel):
    """A reward of each sample by itself; a call has at most `batch_size` samples.

    >>> class Width(PointwiseRewardModel):
    ...     def __call__(self, prompt, image, **kwargs):
    ...         return RewardModelOutput([float(one.width) for one in image])
    """


class GroupwiseRewardModel(BaseRewardModel):
    """A reward of samples relative to their group; a call has one group, and the model batches it itself."""


def read_template(config: RewardArguments, *placeholders: str) -> str | None:
    """Return the text of the file `template_file`, with the prompt's place and each of `placeholders` once.

    So a reward reads wording that vlmrm does not contain. None where no file is named.
    """
    if (path := config.extra_kwargs.get("template_file")) is None:
        return None
    return read_wording(path, f"reward {config.name}: template_file {path}", PLACEHOLDER, *placeholders)
