"""Media of requests: as data URIs, as files of a form, as files below media_root; and what is refused of them."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.serving.sent_media import clip, data_uri, npy, png
from tests.serving.services import fake, in_loop, running
from vlmrm.errors import ConfigError, MediaError
from vlmrm.serving.media import MediaResolver, count_pixels
from vlmrm.serving.settings import Limits


@pytest.fixture(autouse=True)
def pillow_limit(monkeypatch) -> None:
    """Pillow's limit is the process's, and an `MediaResolver` sets it."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)


def form(*parts: tuple[str, bytes], boundary: str = "xx") -> dict:
    """A multipart request; parts but `request` are files."""
    body = b""
    for name, content in parts:
        file = "" if name == "request" else f'; filename="{name}.png"'
        body += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
        )
    body += f"--{boundary}--\r\n".encode()
    return {"content": body, "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}


def request(**item: object) -> bytes:
    return json.dumps({"items": [{"prompt": "aaa", **item}]}).encode()


@in_loop
async def test_form_files_equal_data_uris():
    async with running(fake("size", "fake_reward.ImageBytes")) as (_, client):
        sent = {"items": [{"prompt": "a", "image": data_uri(png())}]}
        plain = (await client.post("/v1/rewards", json=sent)).json()["data"]
        parts = [("request", request(image="attachment:cat")), ("cat", png())]
        attached = (await client.post("/v1/rewards", **form(*parts))).json()["data"]
    assert [one[0]["score"] for one in (plain, attached)] == [len(png())] * 2


@in_loop
async def test_malformed_forms_are_refused_in_a_sentence():
    wrong = [
        (form(("cat", png())), "the form has no part request: send the JSON as one."),
        (form(("request", b"{}"), ("a", b"1"), ("a", b"2")), "the form has two parts called 'a'"),
        (form(("request", b'{"items": [}')), "the JSON is broken: "),
        (form(("request", b"{}"), ("request", b"{}")), "the form has two parts called 'request'"),
        (form(("request", request(image="attachment:a")), ("a", png()), ("b", png())), "the file 'b', to which no"),
        ({"data": {"request": "{}", "model": "length"}, "files": {"a": b"1"}}, "the field 'model', which is no file"),
        ({"content": b"--", "headers": {"Content-Type": "multipart/form-data"}}, "Missing boundary"),
        ({"content": b"junk", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, "the form"),
    ]
    async with running(fake()) as (_, client):
        for sent, sentence in wrong:
            answer = await client.post("/v1/rewards", **sent)
            assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text
        absent = await client.post("/v1/rewards", **form(("request", request(image="attachment:dog"))))
        assert "the request has no file of that name" in absent.json()["data"][0]["error"]


def refused(reference: object, root: Path | None = None, **limits: int) -> str:
    with pytest.raises(MediaError) as error:
        MediaResolver(Limits(**limits), root).image(reference)
    return error.value.reason


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_oversized_images_are_refused_by_their_headers():
    assert refused(data_uri(png()), max_pixels=1000) == "an image is 40x30 pixels, over the limit of 1000"
    assert "over the limit of 50" in refused(data_uri(png()), max_image_bytes=50)
    bomb = bytearray(png())
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    assert "60000x60000" in refused(data_uri(bytes(bomb))) or "too large" in refused(data_uri(bytes(bomb)))


@pytest.fixture
def media(tmp_path) -> Path:
    root = tmp_path / "media"
    root.mkdir()
    (root / "cat.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    (root / "inside").symlink_to(root / "cat.png")
    (root / "outside").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    return root


def test_files_below_media_root_are_read(media):
    intake = MediaResolver(Limits(), media)
    for path in (media / "cat.png", media / "inside", f"{media}/./x/../cat.png"):
        assert intake.image(f"file://{path}") == png()


def test_a_media_root_must_be_a_folder(media):
    with pytest.raises(ConfigError, match=r"which is no folder: did you mean .*media\?"):
        MediaResolver(Limits(), media.parent / "medai")


@pytest.mark.parametrize("path", ["outside", "up/secret.png", "../secret.png", "%2e%2e/secret.png", "up"])
def test_files_outside_media_root_are_not(media, path):
    assert refused(f"file://{media}/{path}", media) == "image is a file outside media_root"
    assert refused("file:///etc/hostname", media) == refused("file:///no/such/file", media)


def test_what_is_no_file_is_not_opened(media):
    assert refused(f"file://{media}/pipe", media) == "image is not a regular file"
    assert "cannot be read (Is a directory)" in refused(f"file://{media}", media)
    assert "cannot be read (No such file or directory)" in refused(f"file://{media}/absent.png", media)
    assert "path is broken" in refused(f"file://{media}/%00", media)
    assert "reads none" in refused(f"file://{media}/cat.png")


def bitmap(side: int) -> bytes:
    """A black PNG of few bytes, however large its side is."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(1 + side // 8) * side, 9)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("place", ["one video", "images", "conditions", "file"])
@in_loop
async def test_small_bodies_of_many_pixels_are_refused_undecoded(place):
    pictures = [data_uri(bitmap(5792))] * 9
    sent = {
        "one video": [{"prompt": "a", "video": pictures}],
        "images": [{"prompt": "a", "image": picture} for picture in pictures],
        "conditions": [{"prompt": "a", "condition_images": pictures}],
        "file": [{"prompt": "a", "video": data_uri(clip(), "video/mp4")}],
    }[place]
    limits = {"max_total_pixels": 56 * 56 * 3} if place == "file" else {}
    async with running(fake("any", "fake_reward.Anything"), limits=limits) as (service, client):
        refused = await client.post("/v1/rewards", json={"items": sent})
        assert await service.backend.depth("any") == (0, 0)
        small = await client.post("/v1/rewards", json={"items": [{"prompt": "a", "image": data_uri(png())}]})
    assert len(json.dumps(sent)) < 2**16 and refused.status_code == 413, refused.text
    assert "over the limit max_total_pixels of" in refused.json()["error"]["message"]
    assert small.status_code == 200


def video(*parts: bytes, **options: object) -> dict:
    """A native item about a video: a file, or frames."""
    uris = [data_uri(part) for part in parts]
    shown = {"type": "video", "video": uris if len(uris) > 1 else uris[0], **options}
    asked = {"role": "user", "content": [shown, {"type": "text", "text": "a"}]}
    return {"messages": [asked, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("options", [{"min_pixels": 6_000_000}, {"resized_height": 3000, "resized_width": 3000}])
@pytest.mark.parametrize("kind", ["file", "frames"])
@in_loop
async def test_pixels_requested_by_part_options_are_counted(kind, options):
    items = [video(*([clip()] if kind == "file" else [png()] * 2), **options)]
    async with running(fake("any", "fake_reward.Anything"), limits={"max_total_pixels": 9_000_000}) as (_, client):
        refused = await client.post("/v1/rewards", json={"items": items})
        plain = await client.post("/v1/rewards", json={"items": [video(clip())]})
    assert refused.status_code == 413 and "max_total_pixels" in refused.json()["error"]["message"]
    assert plain.status_code == 200, plain.text


@pytest.mark.parametrize("options", [{"sample_fps": 0}, {"sample_fps": "2"}, {"min_pixels": "x"}, {"max_pixels": -1}])
@in_loop
async def test_an_unusable_video_option_costs_its_item_alone(options):
    async with running(fake("any", "fake_reward.Anything")) as (_, client):
        answer = await client.post("/v1/rewards", json={"items": [video(clip(), **options), {"prompt": "a"}]})
    bad, good = answer.json()["data"]
    assert next(iter(options)) in bad["error"] and good["score"] == 1


def test_all_media_of_an_item_are_counted():
    item = {"prompt": "a", "image": {"bytes": bitmap(8192)}, "video": {"bytes": clip()}, "metadata": {"type": "video"}}
    assert count_pixels(item)[0] > 8192**2 and count_pixels({**item, "metadata": {"npy": 5}})[0] > 8192**2
    assert count_pixels([{"video": {"bytes": clip()}}, {"prompt": "a"}])[1] == 8 * 56**2


@pytest.mark.parametrize(("shape", "frames", "scale"), [((16, 3, 4, 5), 9, 8), ((48, 3, 4, 5), 9, 16)])
def test_latents_count_as_their_decoded_frames(shape, frames, scale):
    latents = npy(np.zeros(shape, np.float16))
    assert count_pixels({"prompt": "a", "latents": {"npy": latents}}) == (frames * (4 * scale) * (5 * scale),) * 2
