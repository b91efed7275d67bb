"""The images that a reward of single images looks at: a sample's image, or frames of its video."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from vlmrm.errors import RewardError

FRAMES = ("first", "mean")


def views_of(
    image: Sequence[Image.Image] | None, video: Sequence[Sequence[Image.Image]] | None, frames: str
) -> list[Sequence[Image.Image]]:
    """Return the images of each sample: its image, or the first frame or all frames of its video.

    Raises:
        RewardError: when there are both or neither.
    """
    if image is not None and video is not None:
        raise RewardError("there are images and videos, and one of them is to be rewarded: give one.")
    if image is not None:
        return [[picture] for picture in image]
    if video is None:
        raise RewardError("there is neither an image nor a video to reward: give one.")
    return [clip[:1] if frames == "first" else clip for clip in video]
