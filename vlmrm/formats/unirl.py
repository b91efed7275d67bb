"""UniRL's reward requests: turns of a text with the picture or film that was made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from vlmrm.conversation import Sample
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import data_uri

MEDIA = ("image_b64", "video_b64", "video_path")


def read_history(history: Sequence[Mapping[str, Any]]) -> Sample:
    """Read the last turn as a sample; the media of the turns before it are its conditions."""
    last = history[-1]
    images: list[str | None] = []
    videos: list[str | None] = []
    for turn in history:
        image, video, path = map(turn.get, MEDIA)
        if turn["text"] != last["text"]:
            raise RowError("the texts of its history differ, and a reward reads one prompt: send turns of one text")
        if (image, video, path) == (None, None, None):
            raise RowError("a turn of its history has neither an image nor a video")
        if video is not None and path is not None:
            raise RowError("a turn of its history has video_b64 and video_path: send one of them")
        images.append(None if image is None else data_uri(image))
        videos.append(f"file://{quote(path)}" if path is not None else None if video is None else data_uri(video))
    return Sample(
        last["text"],
        image=images.pop(),
        video=videos.pop(),
        condition_images=tuple(image for image in images if image is not None),
        condition_videos=tuple(video for video in videos if video is not None),
    )
