"""Whole requests from a file: the bytes that are sent, and files that cannot be used."""

from __future__ import annotations

import base64
import io
import json

import pytest
import yaml
from PIL import Image

from tests.rewards.judges.judge_server import completion
from vlmrm.errors import ConfigError

JPEG = "data:image/jpeg;base64,{image}"
ASKED = 'Rate {prompt} as {"score": 1}, ü.'


def body(url: str = JPEG, text: str = ASKED, **parameters) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    return {"messages": messages, "model": "published", "temperature": 0.0, "max_tokens": 64, **parameters}


@pytest.fixture
def write(tmp_path):
    def to(**content) -> str:
        (tmp_path / "request.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return str(tmp_path / "request.yaml")

    return to


def jpeg(image: Image.Image, quality: int = 75) -> str:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("style", "spell"),
    [
        ("compact", lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()),
        ("spaced", lambda value: json.dumps(value).encode()),
    ],
)
def test_the_request_file_is_sent_in_exact_spelling(server, judge, picture, write, style, spell):
    server.behave = lambda *_: completion("Final Score: 4")
    path = write(body=body(seed=7), style=style, pictures={"format": "jpeg", "quality": 95})
    prompt = 'a {image} of "{prompt}"\n½'
    assert judge(request_file=path)(prompt=[prompt], image=[picture]).rewards == [4.0]
    url = f"data:image/jpeg;base64,{jpeg(picture, 95)}"
    assert server.sent == [spell(body(url, f'Rate {prompt} as {{"score": 1}}, ü.', seed=7))]


def test_frames_become_parts_and_sources_follow_their_placeholder(server, judge, picture, write):
    server.behave = lambda *_: completion("Final Score: 4")
    request = body()
    request["messages"][1]["content"].insert(0, {"type": "image_url", "image_url": {"url": "{source}"}})
    unified = judge(request_file=write(body=request, pictures={"format": "jpeg"}), max_frames=3)
    white = Image.new("RGB", (8, 8), "white")
    unified(prompt=["a cat"], video=[[picture] * 5], condition_images=[[white]])
    urls = [part["image_url"]["url"] for part in server.bodies[0]["messages"][1]["content"][:-1]]
    assert urls == [jpeg(white), *[f"data:image/jpeg;base64,{jpeg(picture)}"] * 3]
    failures = unified(prompt=["a cat"], image=[picture]).failures
    assert "has nothing for {source}" in failures[0]


def test_retries_of_unreadable_replies_resend_the_request_unchanged(server, judge, picture, write):
    server.behave = lambda *_: completion("Nice.")
    judge(request_file=write(body=body()), malformed_retries=1)(prompt=["a cat"], image=[picture])
    first, second = server.bodies
    assert first == second and first["temperature"] == 0


@pytest.mark.parametrize(
    ("content", "settings", "said"),
    [
        ({"body": {"messages": [], "model": "m"}}, {}, "body needs messages"),
        ({"body": body("x")}, {}, "no {image}"),
        ({"body": body(text="{first}")}, {}, "{first} means nothing"),
        ({"body": body(n=3)}, {}, "stream and n"),
        ({"body": body()}, {"temperature": 0.5}, "temperature and request_file"),
    ],
)
def test_unusable_request_files_are_refused_by_name(judge, write, content, settings, said):
    with pytest.raises(ConfigError) as refused:
        judge(request_file=write(**content), **settings)
    assert said in str(refused.value)
