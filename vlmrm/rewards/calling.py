"""One call of a reward model: what it asks for is there, and what it answers is checked before anyone relies on it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vlmrm.conversation import media_of
from vlmrm.errors import RewardError, RowError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards.contract import BaseRewardModel, RewardModelOutput
from vlmrm.rewards.samples import MEDIA, Samples


class Mistake(RewardError):
    """Samples or a model that do not keep to the contract: no policy forgives it."""


@dataclass
class Answer:
    """What a call made of its samples, by their places: rewards, why there is none, and what else was said."""

    rewards: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    info: dict[int, dict[str, Any]] = field(default_factory=dict)

    def update(self, other: Answer) -> None:
        self.rewards |= other.rewards
        self.failures |= other.failures
        self.info |= other.info


def call(model: BaseRewardModel, samples: Samples) -> Answer:
    """Calls `model` with samples. One whose media or prompt cannot be read fails alone, and one that lacks a medium
    which others of its group have.

    Raises:
        Mistake: when a required field is missing, or the answer is not one number a sample.
    """
    names = _fields(model, samples)
    answer, given, read = Answer(), {name: [] for name in names}, []
    ready: dict[tuple[str, int], Any] = {}  # a picture that many samples show is opened once
    for number, place in enumerate(samples.places):
        try:
            values = {}
            for name in names:
                if name in MEDIA and not samples.has(name, number):
                    raise RowError(f"it has no {name}, which others of its group have: give it to all or to none")
                key = name, id(samples.columns[name][number])
                if key not in ready:
                    ready[key] = samples.value(name, number, model.use_tensor_inputs)
                values[name] = ready[key]
            if model.text_prompts and not isinstance(values.get("prompt", ""), str):
                raise RowError(
                    f"its prompt is a {type(values['prompt']).__name__}, and this reward takes texts: render it"
                )
            shown = _shown(values.get("response"))
            if shown and not model.message_responses:
                raise RowError(f"its answer holds {shown}, and this reward takes texts as answers")
        except RowError as error:
            answer.failures[place] = error.reason
            continue
        read.append(place)
        for name, value in values.items():
            given[name].append(value)
    if read:
        answer.update(_checked(model(**given), read))
    return answer


def _shown(response: Any) -> str | None:
    """Return what an answer as messages shows first; None for a text, or where it shows nothing."""
    media = [] if response is None or isinstance(response, str) else media_of(read_messages(response, "assistant"))
    names = {"image": "an image", "video": "a video"}
    return names[media[0].kind] if media else None


def _checked(output: Any, places: Sequence[int]) -> Answer:
    """The answer about the samples at `places`; a bare tensor or list is taken as rewards."""
    if not isinstance(output, RewardModelOutput):
        output = RewardModelOutput(rewards=getattr(output, "rewards", output))
    rewards = _as_array(output.rewards)
    if rewards.shape != (len(places),):
        raise Mistake(f"it answered {list(rewards.shape)} rewards for {len(places)} samples: return one a sample.")
    answer = Answer(info=_info_by_place(output.extra_info or {}, places))
    for number, (place, reward) in enumerate(zip(places, rewards.tolist(), strict=True)):
        if number in output.failures:
            answer.failures[place] = output.failures[number]
        elif not np.isfinite(reward):
            answer.failures[place] = f"its reward is {reward}"
        else:
            answer.rewards[place] = reward
    return answer


def _fields(model: BaseRewardModel, samples: Samples) -> list[str]:
    """The columns that `model` is called with: those required, and those it accepts that are there."""
    for names in needed(model):
        for number, place in enumerate(samples.places):
            if not any(samples.has(name, number) for name in names):
                raise Mistake(f"sample {place} has no {' or '.join(names)}, which this reward needs: give it one.")
    numbers = range(len(samples))
    return [name for name in accepted_fields(model, samples) if any(samples.has(name, number) for number in numbers)]


def needed(model: BaseRewardModel) -> list[tuple[str, ...]]:
    """What every sample must have: of each of these, one.

    An image and a video are usually one or the other. Flow-Factory's rewards that take either name both in
    `required_fields`, where it only means what is brought from other ranks, and have defaults for both.
    """
    parameters = inspect.signature(type(model).__call__).parameters
    either = tuple(
        name
        for name in ("image", "video")
        if name in model.required_fields and name in parameters and parameters[name].default is None
    )
    if len(either) < 2:
        return [(name,) for name in model.required_fields]
    return [*((name,) for name in model.required_fields if name not in either), either]


def alike(model: BaseRewardModel, samples: Samples, numbers: Sequence[int], size: int) -> Iterator[list[int]]:
    """`numbers` in batches of at most `size` whose samples have the same fields, in order within each kind."""
    accepted = accepted_fields(model, samples)
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for number in numbers:
        kinds.setdefault(tuple(samples.has(name, number) for name in accepted), []).append(number)
    for of_kind in kinds.values():
        yield from (of_kind[start : start + size] for start in range(0, len(of_kind), size))


def accepted_fields(model: BaseRewardModel, samples: Samples) -> list[str]:
    """The columns that `__call__` names; with `**kwargs`, any."""
    parameters = inspect.signature(type(model).__call__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(samples.columns)
    return [name for name in samples.columns if name in parameters]


def named_fields(model: BaseRewardModel) -> list[str]:
    """Return the columns that `__call__` names, whether or not they are there."""
    parameters = inspect.signature(type(model).__call__).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]


def _as_array(rewards: Any) -> np.ndarray:
    if isinstance(rewards, torch.Tensor):
        rewards = rewards.detach().double().cpu().numpy()
    try:
        return np.array(rewards, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise Mistake(f"it answered {rewards!r}: return one number a sample.") from error


def _info_by_place(info: dict[str, Any], places: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What is said of each sample; a value that is no list of one a sample is said of every one."""
    found: dict[int, dict[str, Any]] = {place: {} for place in places} if info else {}
    for name, value in info.items():
        each = isinstance(value, (list, tuple)) and len(value) == len(places)
        for number, place in enumerate(places):
            found[place][name] = value[number] if each else value
    return found
