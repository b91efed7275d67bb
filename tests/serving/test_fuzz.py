"""Whatever is sent: no answer is a fault of the service, and no decoder raises anything but what it declares."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from services import fake, running
from test_fetch import png

from vlmrm.conversation import Video
from vlmrm.data.media import open_image, open_video
from vlmrm.errors import MediaError, RowError
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.media import MediaResolver, read_npy
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import strict_json
from vlmrm.serving.worker.channel import pack, unpack

BODIES = ("application/json", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "")


def examples(count: int) -> Callable[[Any], Any]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, suppress_health_check=checks)


Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def service() -> Generator[tuple[Ask, dict[str, Any]]]:
    """`ask(method, path, **request)` of a service in a thread of its own, and the service's OpenAPI description."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(300)

    limits = {"max_items": 20, "max_body_bytes": 100_000, "max_json_depth": 12}
    context = running(fake("one", "fake_reward.Anything"), limits=limits, long_poll=0.01)
    _, client = wait(context.__aenter__())
    try:
        yield lambda *args, **kwargs: wait(client.request(*args, **kwargs)), wait(client.get("/openapi.json")).json()
    finally:
        wait(context.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)


def check(answer: httpx.Response) -> None:
    assert answer.status_code != 500 and answer.status_code < 600, answer.text
    if answer.headers.get("content-type", "").startswith("application/json"):
        json.loads(answer.content, parse_constant=pytest.fail)
    assert b"Traceback" not in answer.content and b"/work" not in answer.content


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@examples(40)
@given(
    body=st.binary(max_size=300) | ANYTHING.map(lambda tree: json.dumps(tree).encode()),
    kind=st.sampled_from(BODIES),
    query=st.text(max_size=20),
)
def test_any_bytes_to_any_route_are_never_a_fault(service, body, kind, query):
    ask, schema = service
    for path, method in ((path, method) for path, methods in schema["paths"].items() for method in methods):
        check(
            ask(
                method,
                path.replace("{reward}", "one"),
                content=body,
                headers={"Content-Type": kind},
                params={"id": query},
            )
        )


ROLES = ["user", "assistant", "tool", "", None]
MARKS = ["$bytes", "$dict", "url", "a"]  # the first two mean something on a worker's channel
PARTS = st.sampled_from(
    [
        {"type": "image", "image": "data:image/png;base64," + base64.b64encode(png()).decode()},
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
def test_conversations_with_odd_media_are_never_a_fault(service, turns, transform, metadata):
    ask, _ = service
    messages = [{"role": role, "content": content} for role, content in turns]
    items = [{"messages": messages, "group": 1}, {"prompt": "a", "metadata": metadata, "group": 1}]
    answer = ask("POST", "/v1/rewards", json={"items": items, "transform": transform})
    check(answer)
    if answer.status_code == 200:
        assert answer.json()["data"][1]["details"] == {"metadata": metadata or None} or not metadata


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


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.binary()
TREES = st.recursive(
    LEAVES | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MARKS), inner, max_size=2),
    max_leaves=10,
)


@examples(300)
@given(tree=TREES)
def test_every_tree_survives_the_channel(tree):
    assert unpack(pack(tree)) == tree


@examples(300)
@given(data=st.binary(max_size=60) | mutated(pack({"items": [{"image": {"bytes": png()}, "prompt": "a"}]})))
def test_broken_messages_of_a_channel_are_value_errors(data):
    with suppress(ValueError):
        unpack(data)


@examples(300)
@given(data=st.binary(max_size=40) | mutated(b'{"a": [1, "\\ud83d\\ude00", {"b": -0.5e3}], "c": null}'))
def test_broken_json_is_an_invalid_request(data):
    with suppress(InvalidRequest):
        json.dumps(strict_json(data, Limits(max_json_depth=5)), ensure_ascii=False, allow_nan=False).encode()


@examples(200)
@given(
    text=st.text(max_size=60), head=st.sampled_from(["data:", "data:;base64,", "file:", "http://", "attachment:", ""])
)
def test_odd_references_are_media_errors(text, head):
    with suppress(MediaError):
        MediaResolver(Limits(), None).image(head + text)


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


@examples(150)
@given(
    size=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    rest=st.tuples(*[st.integers(0, 255)] * 5),
    body=st.binary(max_size=20),
)
def test_png_headers_that_lie_are_media_errors(size, rest, body):
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">II5B", *size, *rest)
    data = png()[:8] + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
    with suppress(MediaError):
        open_image(MediaResolver(Limits(), None).image(data))


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@examples(300)
@given(data=st.binary(max_size=30) | mutated(npy(np.arange(24.0).reshape(2, 3, 4))[:200]))
def test_broken_arrays_are_media_errors(data):
    with suppress(MediaError):
        read_npy(data)


def test_arrays_are_what_was_saved_and_nothing_but_numbers():
    for array in (
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.asfortranarray(np.ones((3, 2))),
        np.float16(2),
        np.zeros((0, 3)),
    ):
        np.testing.assert_array_equal(read_npy(npy(array)), array)
    zipped, huge = io.BytesIO(), npy(np.zeros((3, 3))).replace(b"(3, 3)", b"(9**9,")
    np.savez_compressed(zipped, np.zeros((4000, 4000)))
    claims = npy(np.zeros((3, 300_000), np.uint8))[:128].replace(b"(3, 300000)", b"(3999999999,)")
    objects = (
        np.lib.format.magic(1, 0)
        + struct.pack("<H", 60)
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(60)
    )
    for wrong in (zipped.getvalue(), huge, claims, objects, npy(np.array(["a"]))):
        with pytest.raises(MediaError, match="an array"):
            read_npy(wrong)


def clip() -> bytes:
    """A second of grey frames."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 56
        for value in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((56, 56, 3), 20 * value, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


CLIP = clip()


@examples(60)
@given(data=st.data())
def test_broken_videos_are_media_errors(data):
    broken = data.draw(mutated(CLIP) | mutated(CLIP[-900:]) | mutated(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"))
    with suppress(RowError):
        open_video(Video(broken), 2.0, 8)


def test_videos_of_enormous_frames_are_not_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 56 * 55)
    with pytest.raises(MediaError, match="frames of 56x56 pixels, over"):
        open_video(Video(CLIP), 2.0, 8)
