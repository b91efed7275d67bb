"""Samples to be rewarded, as columns of equal length, and a call of a reward model with them or with conversations."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vlmrm.conversation import Conversation, media_of
from vlmrm.data.media import RoundMedia, media_round, once, open_image
from vlmrm.errors import MediaError, RewardError, RowError
from vlmrm.formats.flow_factory import conversation_to_sample, write_sample
from vlmrm.formats.openai import answer_text, read_messages, read_reference
from vlmrm.rewards.contract import BaseRewardModel, GroupwiseRewardModel, RewardArguments, RewardModelOutput

if TYPE_CHECKING:
    import torch

MEDIA = ("image", "video", "condition_images", "condition_videos")
PARTS = {"video": "image", "condition_images": "image", "condition_videos": "video"}  # the items of a list of media
Content = Conversation | Mapping[str, Any] | RowError


class Samples:
    """N samples as columns: `prompt`, the media of `MEDIA`, and any columns that a reward asks for.

    An image is a PIL image, a path, bytes, a data URI, or a tensor or array (C, H, W), uint8 or float in [0, 1]; a
    video is a list of images or one array (T, C, H, W); conditions are lists of those. None means that a sample has
    none. A sample whose prompt is a RowError fails in every reward.

    Args:
        groups: the id of each sample's group, such as the number of its prompt; None where there are no groups.
        indices: the samples' names in errors and results; default: their positions.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any] | None],
        groups: Sequence[Hashable] | None = None,
        indices: Sequence[Any] | None = None,
    ):
        self.columns = {name: _listed(name, column) for name, column in columns.items() if column is not None}
        self.groups = None if groups is None else [_group_id(group) for group in groups]
        named = {**self.columns, **({} if self.groups is None else {"groups": self.groups})}
        lengths = {name: len(column) for name, column in named.items()}
        if not lengths:
            raise RewardError("there is nothing to reward: give at least prompts.")
        first, size = next(iter(lengths.items()))
        for name, length in lengths.items():
            if length != size:
                raise RewardError(f"there are {size} of {first} but {length} of {name}: give one of each a sample.")
        self.indices: list[Any] = list(range(size)) if indices is None else list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions, in that order, with the `indices` that they have here."""
        columns = {name: [column[position] for position in positions] for name, column in self.columns.items()}
        groups = None if self.groups is None else [self.groups[position] for position in positions]
        return Samples(columns, groups, [self.indices[position] for position in positions])

    def has(self, name: str, position: int) -> bool:
        """Return whether a sample has a value of this column."""
        return name in self.columns and self.columns[name][position] is not None

    def broken(self, position: int) -> bool:
        """Return whether a sample is only the reason why it is none."""
        return self.has("prompt", position) and isinstance(self.columns["prompt"][position], RowError)

    def by_group(self) -> dict[Hashable, list[int]]:
        """Return the positions of each group's samples, groups by their first sample; empty without groups."""
        groups: dict[Hashable, list[int]] = {}
        for position, group in enumerate(self.groups or ()):
            groups.setdefault(group, []).append(position)
        return groups

    def value(self, name: str, position: int, tensors: bool) -> Any:
        """Return a value as a reward model takes it; media as PIL images, or as tensors."""
        value = self.columns[name][position]
        if name not in MEDIA:
            return value
        convert = CONVERTERS[name, tensors]
        return once(f"{name} as tensors" if tensors else name, value, lambda raw: convert(read_reference(raw)))


def join(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts in order; a column that a part does not have is None there."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: [v for part in parts for v in part.columns.get(name, [None] * len(part))] for name in names}
    groups = None
    if all(part.groups is not None for part in parts):
        groups = [group for part in parts for group in part.groups or ()]
    return Samples(columns, groups, [index for part in parts for index in part.indices])


def _listed(name: str, column: Any) -> list[Any]:
    if isinstance(column, (str, bytes, Mapping)) or not isinstance(column, Iterable):
        raise RewardError(f"{name} is a single {type(column).__name__}: give a list with one for each sample.")
    return list(column)


def _group_id(group: Any) -> Hashable:
    """Return a group's id as a plain value: tensors and numpy scalars of one value are that value."""
    plain = group.item() if getattr(group, "ndim", 1) == 0 else group
    if not isinstance(plain, Hashable) or hasattr(plain, "ndim"):
        raise RewardError(f"groups has a {type(group).__name__}: give each sample a number or a text.")
    return plain


class ContractError(RewardError):
    """Samples or a model that break the contract: no `on_failure` applies to it."""


@dataclass
class CallResult:
    """The rewards of a call's samples by index, the reasons of those without one, and details by name."""

    rewards: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    info: dict[int, dict[str, Any]] = field(default_factory=dict)

    def update(self, result: CallResult) -> None:
        self.rewards |= result.rewards
        self.failures |= result.failures
        self.info |= result.info


def call(model: BaseRewardModel, samples: Samples) -> CallResult:
    """Call `model` with samples. One whose media or prompt cannot be read fails alone.

    So does one that lacks a medium which others of its group have. A medium that many samples share is opened, and
    passed, once; vlmrm's own rewards also share those of a round, and others, which may change theirs, do not.
    """
    own = type(model).__module__.startswith("vlmrm.")
    with media_round(None if own else RoundMedia()):
        return _called(model, samples)


def _called(model: BaseRewardModel, samples: Samples) -> CallResult:
    names = _call_fields(model, samples)
    result, arguments, indices = CallResult(), {name: [] for name in names}, []
    for position, index in enumerate(samples.indices):
        try:
            if samples.broken(position):
                raise samples.columns["prompt"][position]
            values = {}
            for name in names:
                if name in MEDIA and not samples.has(name, position):
                    raise RowError(f"it has no {name}, which others of its group have: give it to all or to none")
                values[name] = samples.value(name, position, model.use_tensor_inputs)
            if model.text_prompts and not isinstance(values.get("prompt", ""), str):
                raise RowError(
                    "its prompt is messages, as with a system turn or several turns, and this reward takes one text: "
                    "give it as one, or a service of vlmrm as the model_path of vlm_reward, which takes messages"
                )
            medium = _first_medium(values.get("response"))
            if medium and not model.message_responses:
                raise RowError(f"its answer holds {medium}, and this reward takes texts as answers")
        except RowError as error:
            result.failures[index] = error.reason
            continue
        indices.append(index)
        for name, value in values.items():
            arguments[name].append(value)
    if indices:
        result.update(_shaped(model, _read_output(model(**arguments), indices), samples))
    return result


def _shaped(model: BaseRewardModel, result: CallResult, samples: Samples) -> CallResult:
    """Return the result with each reward as the configuration makes it; one that it refuses has failed."""
    responses = dict(zip(samples.indices, samples.columns.get("response", [None] * len(samples)), strict=True))
    for index, reward in list(result.rewards.items()):
        try:
            result.rewards[index] = shaped(model.config, reward, result.info.get(index, {}), responses[index])
        except RowError as error:
            del result.rewards[index]
            result.failures[index] = error.reason
    return result


def shaped(arguments: RewardArguments, reward: float, details: Mapping[str, Any], response: Any) -> float:
    """Return a sample's reward as the run gets it.

    Of the model's `details`, `uncertainty_penalty` reads `std`, or `log_sigma`, its logarithm.
    """
    if arguments.valid is not None and not arguments.valid[0] <= reward <= arguments.valid[1]:
        low, high = arguments.valid
        raise RowError(f"its reward {reward:.6g} is outside valid, {low:g} to {high:g}")
    if arguments.uncertainty_penalty:
        reward -= arguments.uncertainty_penalty * _deviation(details)
    if arguments.length_penalty:
        if response is None:
            raise RowError("it has no response, whose words length_penalty counts: leave length_penalty out")
        words = len(answer_text(response).split())
        reward -= arguments.length_penalty * max(words - arguments.length_free, 0)
    if arguments.clip is not None:
        reward = min(max(reward, arguments.clip[0]), arguments.clip[1])
    return reward


def _deviation(details: Mapping[str, Any]) -> float:
    if details.get("std") is not None:
        return float(details["std"])
    if details.get("log_sigma") is not None:
        return math.exp(details["log_sigma"])
    raise RowError("its reward tells no std or log_sigma, which uncertainty_penalty takes: leave it out")


def _first_medium(response: Any) -> str | None:
    """Return the kind of the first medium in an answer as messages; None where it has none."""
    media = [] if response is None or isinstance(response, str) else media_of(read_messages(response, "assistant"))
    kinds = {"image": "an image", "video": "a video"}
    return kinds[media[0].kind] if media else None


def _read_output(output: Any, indices: Sequence[int]) -> CallResult:
    """Return the result of the samples at `indices`; a bare tensor or list is taken as rewards."""
    if not isinstance(output, RewardModelOutput):
        output = RewardModelOutput(rewards=getattr(output, "rewards", output))
    rewards: Any = output.rewards
    rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(rewards, (list, tuple)) or all(isinstance(reward, (str, list)) for reward in rewards):
        raise ContractError(f"it answered {rewards!r:.100}: return one number a sample.")
    if len(rewards) != len(indices):
        raise ContractError(f"it answered {len(rewards)} rewards for {len(indices)} samples: return one a sample.")
    result = CallResult(info=_info_by_index(output.extra_info or {}, indices))
    for position, (index, reward) in enumerate(zip(indices, rewards, strict=True)):
        try:
            finite = math.isfinite(reward)
        except TypeError:
            finite = False
        if position in output.failures:
            result.failures[index] = output.failures[position]
        elif not finite:
            result.failures[index] = f"its reward is {reward!r:.60}"
        else:
            result.rewards[index] = float(reward)
    return result


def _call_fields(model: BaseRewardModel, samples: Samples) -> list[str]:
    """Return the columns to call `model` with: those required, and those that it accepts and any sample has."""
    for names in required_columns(model):
        for position, index in enumerate(samples.indices):
            if not samples.broken(position) and not any(samples.has(name, position) for name in names):
                raise ContractError(f"sample {index} has no {' or '.join(names)}, which this reward needs: give one.")
    positions = range(len(samples))
    return [name for name in accepted_fields(model, samples.columns) if any(samples.has(name, n) for n in positions)]


def required_columns(model: BaseRewardModel) -> list[tuple[str, ...]]:
    """Return the columns that every sample must have: one of each tuple.

    An image and a video are usually alternatives. Flow-Factory's rewards that take either name both in
    `required_fields`, where it only means what is gathered from other ranks, and have defaults for both.
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


def batched(model: BaseRewardModel, samples: Samples, positions: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield `positions` in batches of at most `size` samples with the same fields, each kind in order."""
    accepted = accepted_fields(model, samples.columns)
    by_fields: dict[tuple[bool, ...], list[int]] = {}
    for position in positions:
        by_fields.setdefault(tuple(samples.has(name, position) for name in accepted), []).append(position)
    for same_fields in by_fields.values():
        yield from (same_fields[start : start + size] for start in range(0, len(same_fields), size))


def accepted_fields(model: BaseRewardModel, columns: Iterable[str]) -> list[str]:
    """Return those of `columns` that `__call__` names; with `**kwargs`, all."""
    parameters = inspect.signature(type(model).__call__).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in columns if every or name in parameters]


def _info_by_index(info: dict[str, Any], indices: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the details of each sample; a value that is no list of one a sample applies to every sample."""
    by_index: dict[int, dict[str, Any]] = {index: {} for index in indices} if info else {}
    for name, value in info.items():
        per_sample = isinstance(value, (list, tuple)) and len(value) == len(indices)
        for position, index in enumerate(indices):
            by_index[index][name] = value[position] if per_sample else value
    return by_index


def as_pil(name: str, value: Any) -> Any:
    """Return the arrays of a media column, which no conversation can hold, as PIL images; anything else unchanged."""
    if name not in MEDIA:
        return value
    if isinstance(value, list):
        return [as_pil(PARTS[name], item) for item in value]
    return CONVERTERS[name, False](value) if isinstance(value, np.ndarray) else value


def to_pil(image: Any) -> Image.Image:
    """Return an image in any form as an RGB PIL image."""
    if not _is_array(image):
        return open_image(image)
    pixels = _valid_image(image)
    if not str(pixels.dtype).endswith("uint8"):
        pixels = (pixels * 255).round()
    if _is_tensor(pixels):
        # By way of float32: numpy has no bfloat16.
        pixels = pixels.detach().float().cpu().numpy()
    return Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0))


def to_tensor(image: Any) -> torch.Tensor:
    """Return an image in any form as a float tensor (3, H, W) in [0, 1]; gradients of a tensor go through."""
    import torch
    from torchvision.transforms.functional import pil_to_tensor

    tensor = torch.as_tensor(_valid_image(image)) if _is_array(image) else pil_to_tensor(open_image(image))
    return tensor / 255 if tensor.dtype == torch.uint8 else tensor.float()


def _is_tensor(value: Any) -> bool:
    """Return whether it is a torch tensor. A process that has not imported torch has none."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _valid_image(image: Any) -> Any:
    """Return a tensor or array of one image unchanged."""
    kind = str(image.dtype)
    if image.ndim != 3 or image.shape[0] != 3:
        raise MediaError(f"a tensor has the shape {tuple(image.shape)}: an image is (3, height, width)")
    if kind.endswith("uint8"):
        return image
    if "float" not in kind:
        raise MediaError(f"a tensor is {kind}: an image is uint8, or float in [0, 1]")
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= 1):  # also NaN
        raise MediaError(f"a float tensor has values from {low:.3g} to {high:.3g}: scale it to [0, 1]")
    return image


def _frames(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Return a function that applies `convert` to each frame of a video or image of a list."""

    def frames_of(frames: Any) -> list[Any]:
        if isinstance(frames, (str, bytes)) or not (isinstance(frames, (list, tuple)) or _is_array(frames)):
            raise MediaError(f"{type(frames).__name__} is no list: give a list of images, or a tensor of them")
        if not len(frames):
            raise MediaError("it is an empty list")
        return [convert(frame) for frame in frames]

    return frames_of


def _stacked(convert: Callable[[Any], list[torch.Tensor]]) -> Callable[[Any], torch.Tensor | list[torch.Tensor]]:
    """Return a function that stacks the tensors of `convert` where all have one shape."""

    def stack(items: Any) -> torch.Tensor | list[torch.Tensor]:
        import torch

        tensors = convert(items)
        return torch.stack(tensors) if len({tensor.shape for tensor in tensors}) == 1 else tensors

    return stack


def _video_tensor(video: Any) -> torch.Tensor:
    import torch

    frames = _frames(to_tensor)(video)
    if len({frame.shape for frame in frames}) > 1:
        raise MediaError("the frames of a video have different sizes: resize them to one")
    return torch.stack(frames)


# Converters of a column's values to PIL images (False) or tensors (True).
CONVERTERS: dict[tuple[str, bool], Callable[[Any], Any]] = {
    ("image", False): to_pil,
    ("image", True): to_tensor,
    ("video", False): _frames(to_pil),
    ("video", True): _video_tensor,
    ("condition_images", False): _frames(to_pil),
    ("condition_images", True): _stacked(_frames(to_tensor)),
    ("condition_videos", False): _frames(_frames(to_pil)),
    ("condition_videos", True): _stacked(_frames(_video_tensor)),
}


def reward_items(model: BaseRewardModel, items: Sequence[Content], groups: Sequence[Hashable]) -> CallResult:
    """Return the rewards of conversations that end with the answer and of samples by their columns, by index.

    An item that is an error, or lacks what the reward needs, fails alone. `groups` has the id of each item's group.
    """
    reads_answers = bool(accepted_fields(model, ["response"]))
    rows = [_item_row(model, item, reads_answers) for item in items]
    names = dict.fromkeys(["prompt", *(name for row in rows for name in row if name != "group")])
    samples = Samples({name: [row.get(name) for row in rows] for name in names}, groups)
    if isinstance(model, GroupwiseRewardModel):
        batches = samples.by_group().values()
    else:
        batches = batched(model, samples, range(len(samples)), model.config.batch_size)
    result = CallResult()
    for batch in batches:
        result.update(call(model, samples.take(batch)))
    return result


def _item_row(model: BaseRewardModel, item: Content, reads_answers: bool) -> Mapping[str, Any]:
    """Return the columns of an item, or as its prompt why it has none."""
    try:
        if isinstance(item, RowError):
            raise item
        row = write_sample(conversation_to_sample(item)) if isinstance(item, Conversation) else item
        for names in required_columns(model):
            if all(row.get(name) is None for name in names):
                raise RowError(f"it has no {' or '.join(names)}, which this reward needs")
        # A sample may have columns for other rewards, but a conversation is about its answer.
        if isinstance(item, Conversation) and row.get("response") is not None and not reads_answers:
            raise RowError("its answer is no image or video alone, and this reward reads no response")
        return row
    except RowError as error:
        return {"prompt": error}
