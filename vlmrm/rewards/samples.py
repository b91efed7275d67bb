"""What rewards are computed of: columns of equal length, and their media as PIL images or tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from vlmrm.data.media import open_image
from vlmrm.errors import MediaError, RewardError
from vlmrm.formats.openai import read_reference

MEDIA = ("image", "video", "condition_images", "condition_videos")
PARTS = {"video": "image", "condition_images": "image", "condition_videos": "video"}  # what a list of it holds


class Samples:
    """N samples as columns: `prompt`, the media of `MEDIA`, and any others that a reward asks for.

    An image is a PIL image, a path, bytes, a data URI, or a tensor or array (C, H, W), uint8 or float in [0, 1]; a
    video a list of images or one (T, C, H, W); conditions lists of those. None says that a sample has none.

    Args:
        groups: the id of each sample's group, such as its prompt's number; None where there are no groups.
        places: what errors call the samples; their numbers.

    Raises:
        RewardError: when a column is no list, or two differ in length, naming them.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any] | None],
        groups: Sequence[Hashable] | None = None,
        places: Sequence[int] | None = None,
    ):
        self.columns = {name: _listed(name, column) for name, column in columns.items() if column is not None}
        self.groups = None if groups is None else [_plain(group) for group in groups]
        named = {**self.columns, **({} if self.groups is None else {"groups": self.groups})}
        lengths = {name: len(column) for name, column in named.items()}
        if not lengths:
            raise RewardError("there is nothing to reward: give at least prompts.")
        first, size = next(iter(lengths.items()))
        for name, length in lengths.items():
            if length != size:
                raise RewardError(f"there are {size} of {first} but {length} of {name}: give one of each a sample.")
        self.places = list(range(size)) if places is None else list(places)

    def __len__(self) -> int:
        return len(self.places)

    def take(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers, in that order; `places` still says where they were."""
        columns = {name: [column[number] for number in numbers] for name, column in self.columns.items()}
        groups = None if self.groups is None else [self.groups[number] for number in numbers]
        return Samples(columns, groups, [self.places[number] for number in numbers])

    def has(self, name: str, number: int) -> bool:
        return name in self.columns and self.columns[name][number] is not None

    def grouped(self) -> dict[Hashable, list[int]]:
        """The numbers of each group's samples, groups in the order of their first; nothing without groups."""
        found: dict[Hashable, list[int]] = {}
        for number, group in enumerate(self.groups or ()):
            found.setdefault(group, []).append(number)
        return found

    def value(self, name: str, number: int, tensors: bool) -> Any:
        """What a reward model is given of a sample; media as PIL images, or as tensors.

        Raises:
            MediaError: when it cannot be read, or is no picture.
        """
        value = self.columns[name][number]
        return CONVERTERS[name, tensors](read_reference(value)) if name in MEDIA else value


def _listed(name: str, column: Any) -> list[Any]:
    if isinstance(column, (str, bytes, Mapping)) or not isinstance(column, Iterable):
        raise RewardError(f"{name} is a single {type(column).__name__}: give a list with one for each sample.")
    return list(column)


def pictures_of(name: str, value: Any) -> Any:
    """Return the arrays of a media column, which no conversation can hold, as PIL images; anything else as it is."""
    if name not in MEDIA:
        return value
    if isinstance(value, list):
        return [pictures_of(PARTS[name], one) for one in value]
    return CONVERTERS[name, False](value) if isinstance(value, np.ndarray) else value


def to_pil(image: Any) -> Image.Image:
    """An image in any form as an RGB PIL image."""
    if isinstance(image, (torch.Tensor, np.ndarray)):
        tensor = _checked(image)
        return to_pil_image(tensor if tensor.dtype == torch.uint8 else (tensor * 255).round().to(torch.uint8))
    return open_image(image)


def to_tensor(image: Any) -> torch.Tensor:
    """An image in any form as a float tensor (3, H, W) in [0, 1]; gradients of a tensor go through."""
    if isinstance(image, (torch.Tensor, np.ndarray)):
        tensor = _checked(image)
        return tensor / 255 if tensor.dtype == torch.uint8 else tensor.float()
    return pil_to_tensor(open_image(image)) / 255


def _checked(image: torch.Tensor | np.ndarray) -> torch.Tensor:
    tensor = torch.as_tensor(image)
    if tensor.dim() != 3 or tensor.shape[0] != 3:
        raise MediaError(f"a tensor has the shape {tuple(tensor.shape)}: an image is (3, height, width)")
    if tensor.dtype == torch.uint8:
        return tensor
    if not tensor.is_floating_point():
        raise MediaError(f"a tensor is {tensor.dtype}: an image is uint8, or float in [0, 1]")
    low, high = (float(bound) for bound in torch.aminmax(tensor.detach()))
    if not (low >= 0 and high <= 1):  # also NaN
        raise MediaError(f"a float tensor has values from {low:.3g} to {high:.3g}: scale it to [0, 1]")
    return tensor


def _frames(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """`convert` over a video's frames or a list of images."""

    def each(frames: Any) -> list[Any]:
        if isinstance(frames, (str, bytes)) or not isinstance(frames, (list, tuple, torch.Tensor, np.ndarray)):
            raise MediaError(f"{type(frames).__name__} is no list: give a list of images, or a tensor of them")
        if not len(frames):
            raise MediaError("it is an empty list")
        return [convert(frame) for frame in frames]

    return each


def _stacked(convert: Callable[[Any], list[torch.Tensor]]) -> Callable[[Any], torch.Tensor | list[torch.Tensor]]:
    """One tensor where all have one shape."""

    def each(items: Any) -> torch.Tensor | list[torch.Tensor]:
        tensors = convert(items)
        return torch.stack(tensors) if len({tensor.shape for tensor in tensors}) == 1 else tensors

    return each


def _video_tensor(video: Any) -> torch.Tensor:
    frames = _frames(to_tensor)(video)
    if len({frame.shape for frame in frames}) > 1:
        raise MediaError("the frames of a video have different sizes: resize them to one")
    return torch.stack(frames)


# How a column's values become PIL images (False) or tensors (True).
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


def _plain(group: Any) -> Hashable:
    """A group's id as a plain value: tensors and numpy scalars with one value are that value."""
    try:
        group = group.item() if isinstance(group, (torch.Tensor, np.generic)) else group
        hash(group)
    except (TypeError, RuntimeError):
        raise RewardError(f"groups has a {type(group).__name__}: give each sample a number or a text.") from None
    return group
