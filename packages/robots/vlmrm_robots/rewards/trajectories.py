"""The frames that a reward of trajectories looks at: a sample's image or video, or the images that are its answer.

Pairs of `vlmrm frames pairs` have answers of several images, which are no video: a model trained here reads images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vlmrm.conversation import Image, Part, Video
from vlmrm.errors import RowError
from vlmrm.formats.openai import read_messages


def frames_of_samples(
    count: int,
    image: Sequence[Any] | None,
    video: Sequence[Any] | None,
    response: Sequence[Any] | None,
    convert: Callable[[Any], Any],
) -> list[Sequence[Any] | RowError]:
    """Return the frames of each of `count` samples in the order of time, or why it has none.

    They are its image, its video, or the images or video of an answer as messages. An answer as a text beside an image
    or video is another reward's.

    Args:
        convert: turns an image of an answer into what the reward takes, as its images and videos are already.
    """
    none = [None] * count
    columns = zip(image or none, video or none, response or none, strict=True)
    return [_frames(*values, convert) for values in columns]


def _frames(image: Any, video: Any, response: Any, convert: Callable[[Any], Any]) -> Sequence[Any] | RowError:
    shown = [[image]] * (image is not None) + [video] * (video is not None)
    if response is not None and not (isinstance(response, str) and shown):
        try:
            shown.append(_of_answer(response, convert))
        except RowError as error:
            return error
    if len(shown) != 1:
        several = "several of an image, a video and an answer of frames" if shown else "no image, video or answer"
        return RowError(f"it has {several}: give one of them")
    return shown[0]


def _of_answer(response: Any, convert: Callable[[Any], Any]) -> list[Any]:
    parts = [part for message in read_messages(response, "assistant") for part in message.content]
    return [convert(reference) for reference in frames_in(parts)]


def frames_in(parts: Sequence[Part]) -> Sequence[Any]:
    """Return the frames that an answer consists of: its images, or those of its one video."""
    if len(parts) == 1 and isinstance(parts[0], Video) and isinstance(parts[0].reference, (list, tuple)):
        return parts[0].reference
    images = [part.reference for part in parts if isinstance(part, Image)]
    if not images or len(images) < len(parts):
        raise RowError("its answer is no list of images, and this reward looks at frames: give images, or a video")
    return images
