"""References become pixels, or one sentence that names them."""

import base64
import io

import av
import numpy as np
import pytest
import torch
from PIL import Image
from qwen_vl_utils import vision_process

from vlmrm.conversation import FRAME_PIXELS, Video, VideoOptions
from vlmrm.data.media import PathRules, media_key, open_image, open_video
from vlmrm.errors import MediaError
from vlmrm.formats.openai import read_reference


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def picture() -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8))


def test_every_kind_of_reference_opens_to_equal_pixels(picture, tmp_path):
    data = encode(picture)
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    references = [str(path), path, path.as_uri(), uri, data, picture]
    cells = {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}
    references += map(read_reference, cells)
    for reference in references:
        assert np.array_equal(np.asarray(open_image(reference)), np.asarray(picture))


def test_transparent_images_are_put_on_white(tmp_path):
    image = Image.new("RGBA", (30, 30), (255, 0, 0, 0))
    assert open_image(image).getpixel((5, 5)) == (255, 255, 255)
    palette = Image.new("P", (30, 30), 0)
    palette.putpalette([0, 0, 255])
    assert open_image(encode(palette, transparency=0)).getpixel((5, 5)) == (255, 255, 255)
    assert open_image(encode(palette)).getpixel((5, 5)) == (0, 0, 255)


def test_exif_orientation_is_applied(picture):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = encode(picture, exif=exif)
    assert open_image(data).size == open_image(Image.open(io.BytesIO(data))).size == (40, 60)


def test_sixteen_bit_greys_keep_their_shades():
    grey = Image.fromarray(np.full((30, 30), 0x8000, dtype=np.uint16))
    assert open_image(encode(grey)).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "zero bytes"),
        (b"hello", "not an image"),
        (encode(Image.new("RGB", (1, 201))), "200-fold"),
        (encode(Image.new("RGB", (28, 28 * 201))), "200-fold"),
        (encode(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")[:900], "broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n", "not an image"),
    ],
)
def test_a_bad_file_is_named_with_its_reason(content, reason, tmp_path):
    path = tmp_path / "bad.png"
    path.write_bytes(content)
    with pytest.raises(MediaError, match=reason) as caught:
        open_image(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_missing_files_urls_and_bombs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    for reference, said in (
        (str(tmp_path / "none.png"), "does not exist"),
        ("https://example.org/cat.png", "download"),
        ("data:image/png;base64,@@@@", "base64"),
        (encode(Image.new("RGB", (50, 60))), "limit"),
    ):
        with pytest.raises(MediaError, match=said):
            open_image(reference)


def test_keys_are_equal_for_equal_content_only(picture, tmp_path, monkeypatch):
    data = encode(picture)
    monkeypatch.chdir(tmp_path)
    assert media_key("a.png") == media_key(str(tmp_path / "a.png")) == media_key(f"file://{tmp_path}/a.png")
    assert media_key("a.png") != media_key("b.png")
    of_a_table = read_reference({"bytes": data, "path": "elsewhere.png"})
    assert media_key(data) == media_key(of_a_table) != media_key(data + b"x")
    assert media_key(picture) == media_key(picture.copy()) != media_key(picture.rotate(180))
    assert media_key(["a.png", "b.png"]) != media_key(["b.png", "a.png"])


def test_paths_are_rewritten_and_kept_inside_the_root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    rules = PathRules(str(root), str(root), (("s3://bucket/", ""), ("/old", str(root))))
    assert rules("a.png") == rules("s3://bucket/a.png") == rules("/old/a.png") == str(root / "a.png")
    assert rules(read_reference({"bytes": None, "path": "a.png"})) == str(root / "a.png")
    assert rules(read_reference({"bytes": b"x", "path": "/etc/passwd"})) == b"x"
    assert rules(read_reference(["a.png", "data:,x"])) == (str(root / "a.png"), "data:,x")
    for outside in ("../a.png", "/etc/passwd", "link/a.png", "file:///etc/passwd", "../rootling/a.png"):
        with pytest.raises(MediaError, match="outside image_root"):
            rules(outside)


@pytest.fixture
def clip(tmp_path):
    """Three seconds at 10 frames a second; frame i has grey value 8 i."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(30):
            grey = np.full((64, 64, 3), 8 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_a_video_file_gives_the_frames_asked_for(clip):
    frames, metadata = open_video(Video(str(clip)), fps=2.0, max_frames=768)
    assert metadata["fps"] == 10 and metadata["total_num_frames"] == 30
    assert metadata["frames_indices"] == [0, 6, 12, 17, 23, 29]  # 3 s at 2 a second, spread evenly
    assert frames.shape[:2] == (6, 3) and frames.dtype.is_floating_point is False
    greys = frames.float().mean(dim=(1, 2, 3)).tolist()
    assert greys == pytest.approx([8 * i for i in metadata["frames_indices"]], abs=4)


def test_limits_of_the_run_and_of_the_part(clip):
    def count(**options) -> int:
        return len(open_video(Video(clip.read_bytes(), VideoOptions(**options)), fps=10.0, max_frames=8)[0])

    assert count() == 8
    assert count(nframes=4, fps=None) == 4
    assert count(max_frames=12) == 12


def test_a_list_of_frames_is_a_video(picture):
    frames, metadata = open_video(Video([picture] * 3, VideoOptions(sample_fps=4.0)), fps=2.0, max_frames=768)
    assert len(frames) == 4 and metadata["fps"] == 4.0  # an odd number is completed by the last frame


@pytest.mark.parametrize("make", ["truncated", "missing", "text", "playlist"])
def test_a_bad_video_is_named(make, clip, tmp_path):
    path = tmp_path / "bad.mp4"
    contents = {
        "truncated": clip.read_bytes()[:900],
        "text": b"not a video",
        "playlist": f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{clip}\n#EXT-X-ENDLIST\n".encode(),
    }
    if make in contents:
        path.write_bytes(contents[make])
    with pytest.raises(MediaError) as caught:
        open_video(Video(str(path)), fps=2.0, max_frames=8)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"max_pixels": 28 * 28 * 200}, {"min_pixels": 28 * 28 * 500}, {"total_pixels": 28 * 28 * 900}),
        {"resized_height": 100, "resized_width": 200, "sample_fps": 4.0, "raw_fps": 30.0},
    ],
)
@pytest.mark.parametrize("count", [1, 5])
def test_resizing_videos_by_frame_equals_the_library(count, options):
    noise = np.random.default_rng(0).integers(0, 255, (count, 400, 600, 3), dtype=np.uint8)
    frames = [Image.fromarray(frame) for frame in noise]
    expected, described = vision_process.fetch_video({"video": frames, **options}, return_video_metadata=True)
    video, metadata = open_video(Video(frames, VideoOptions(**options)), 2.0, 8)
    assert torch.equal(video, expected.to(torch.uint8)) and metadata == described


@pytest.mark.parametrize(
    "options",
    [
        *({"fps": "2"}, {"max_pixels": 50000}, {"min_pixels": 10**400}, {"resized_height": 100}, {"video_start": -1}),
        *({"min_pixels": 3e5, "max_pixels": 2e5}, {"resized_height": 28, "resized_width": 28000}),
    ],
)
@pytest.mark.parametrize("kind", ["file", "frames"])
def test_an_unusable_video_option_is_named(clip, picture, kind, options):
    reference = str(clip) if kind == "file" else [picture] * 2
    with pytest.raises(MediaError, match="|".join([*options, "to its options", "cannot be read as a video"])):
        open_video(Video(reference, VideoOptions(**options)), 2.0, 8)


def test_frame_pixel_bounds_are_those_of_the_library():
    bounds = (vision_process.VIDEO_MIN_TOKEN_NUM, vision_process.VIDEO_MAX_TOKEN_NUM)
    assert tuple(bound * 28 * 28 for bound in bounds) == FRAME_PIXELS
