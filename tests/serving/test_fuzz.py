"""Whatever is sent: no answer is a fault of the service, and no decoder raises anything but what it declares."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.serving.sent_media import clip, data_uri, npy, png
from tests.serving.services import fake, served
from vlmrm.conversation import Video
from vlmrm.data.media import open_image, open_video
from vlmrm.errors import MediaError, RowError
from vlmrm.serving.media import MediaResolver, read_npy
from vlmrm.serving.settings import Limits


def examples(count: int) -> Callable[[Any], Any]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, suppress_health_check=checks)


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    limits = {"max_items": 20, "max_body_bytes": 100_000, "max_json_depth": 12}
    with served(fake("one", "fake_reward.Anything"), limits=limits) as url:
        yield url


ROLES = ["user", "assistant", "tool", "", None]
MARKS = ["$bytes", "$dict", "url", "a"]  # the first two mean something on a worker's channel
PARTS = st.sampled_from(
    [
        {"type": "image", "image": data_uri(png())},
        {"type": "image_url", "image_url": {"url": "data:,%89PNG"}},
        {"type": "video", "video": ["data:;base64,AAAA"]},
        {"type": "image", "image": "file:///etc/passwd"},
        {"type": "image", "image": "http://169.254.169.254/"},
        {"type": "image", "image": {"$bytes": [0, 9]}},
        {"type": "image", "image": "attachment:" + "../" * 9},
        {"type": "text", "text": "\x00\ufffe"},
        {"type": "text"},
        "plain",
        7,
    ]
)


@examples(60)
@given(
    turns=st.lists(st.tuples(st.sampled_from(ROLES), st.lists(PARTS, max_size=3)), max_size=3),
    transform=st.sampled_from(["raw", "zscore", "rank", "normalized", "win_rate"]),
    metadata=st.dictionaries(st.sampled_from(MARKS), st.integers() | st.just([0, 5]), max_size=2),
)
def test_conversations_with_odd_media_are_never_a_fault(address, turns, transform, metadata):
    messages = [{"role": role, "content": content} for role, content in turns]
    items = [{"messages": messages, "group": 1}, {"prompt": "a", "metadata": metadata, "group": 1}]

    answer = httpx.post(f"{address}/v1/rewards", json={"items": items, "transform": transform}, timeout=300)

    assert answer.status_code in (200, 400, 413, 422) and "Traceback" not in answer.text
    body = json.loads(answer.content, parse_constant=pytest.fail)
    if answer.status_code == 200:
        assert body["data"][1]["details"] == {"metadata": metadata or None} or not metadata


# The decoders --------------------------------------------------------------------------------------------------------


def mutated(whole: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes replaced, cut off, or put in."""
    edit = st.tuples(st.integers(0, len(whole)), st.integers(0, 8), st.binary(max_size=8))

    def edited(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = whole
        for place, dropped, put in edits:
            data = data[:place] + put + data[place + dropped :]
        return data

    return st.lists(edit, min_size=1, max_size=4).map(edited)


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((64, 48)).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
@examples(60)
@given(data=st.data())
def test_broken_images_are_media_errors(kind, data):
    broken = data.draw(mutated(encoded(kind)[:300]) | mutated(encoded(kind)))
    with suppress(MediaError):
        MediaResolver(Limits(), None).image(broken)
        open_image(broken)


def test_oversized_arrays_and_object_arrays_are_refused():
    zipped, huge = io.BytesIO(), npy(np.zeros((3, 3))).replace(b"(3, 3)", b"(9**9,")
    np.savez_compressed(zipped, np.zeros((4000, 4000)))
    claims = npy(np.zeros((3, 300_000), np.uint8))[:128].replace(b"(3, 300000)", b"(3999999999,)")
    for wrong in (zipped.getvalue(), huge, claims, npy(np.array([{}])), npy(np.array(["a"]))):
        with pytest.raises(MediaError, match="an array"):
            read_npy(wrong)


@examples(60)
@given(data=st.data())
def test_broken_videos_are_media_errors(data):
    broken = data.draw(
        mutated(clip()) | mutated(clip()[-900:]) | mutated(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")
    )
    with suppress(RowError):
        open_video(Video(broken), 2.0, 8)


def test_videos_of_enormous_frames_are_not_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 56 * 55)
    with pytest.raises(MediaError, match="frames of 56x56 pixels, over"):
        open_video(Video(clip()), 2.0, 8)
