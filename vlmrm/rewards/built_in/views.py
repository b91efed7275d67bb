"""What rewards of single images look at: a sample's image, or frames of its video; and equal ones but once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from PIL import Image

from vlmrm.errors import RewardError

FRAMES = ("first", "mean")


def views_of(
    image: Sequence[Image.Image] | None, video: Sequence[Sequence[Image.Image]] | None, frames: str
) -> list[Sequence[Image.Image]]:
    """Return the images of each sample: its image, or the first frame or all frames of its video."""
    if image is not None and video is not None:
        raise RewardError("there are images and videos, and one of them is to be rewarded: give one.")
    if image is not None:
        return [[picture] for picture in image]
    if video is None:
        raise RewardError("there is neither an image nor a video to reward: give one.")
    return [clip[:1] if frames == "first" else clip for clip in video]


def once_each(
    keys: Iterable[Hashable], items: Sequence[Any], compute: Callable[[list[Any]], Iterable[Any]]
) -> list[Any]:
    """Return what `compute` makes of each item, and of equal ones once: they tie exactly."""
    keys = list(keys)
    distinct = dict(zip(keys, items, strict=True))
    by_key = dict(zip(distinct, compute(list(distinct.values())), strict=True))
    return [by_key[key] for key in keys]
