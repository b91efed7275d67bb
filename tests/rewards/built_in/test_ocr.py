"""The OCR reward, with its real models on drawn text."""

from __future__ import annotations

import pytest
from PIL import Image, ImageDraw, ImageFont

from vlmrm.errors import RewardError
from vlmrm.rewards import RewardSet
from vlmrm.rewards.built_in.ocr import likeness, normalised, quoted

pytest.importorskip("rapidocr", reason="rapidocr is not installed")


@pytest.mark.parametrize(
    ("prompt", "targets"),
    [
        ('a sign that says "Hello World"', ["Hello World"]),
        ("une affiche «Bonjour»", ["Bonjour"]),
        ('写着"你好"的牌子', ["你好"]),
        ('a cup "one" and a hat “two”', ["one", "two"]),
        ("a sign that says 'Don't stop'.", ["Don't stop"]),
        ("the dog's bowl and the cats' toys, Joe's", []),
        ("Joe's sign says \"it's 'new'\"", ["it's 'new'"]),
        ('a 5" screen that says "on"', ["on"]),
        ('pipes of 5" and 6"', []),
        ('a size of "12" please', ["12"]),
    ],
)
def test_what_a_prompt_quotes(prompt, targets):
    assert quoted(prompt) == targets


@pytest.mark.parametrize(
    ("targets", "read", "reward"),
    [
        (["Hello World"], "HELLO\nworld", 1.0),
        (["open"], "the shop is OPEN today", 1.0),
        (["abcd"], "abxd", 0.75),
        (["abcd"], "abcde fghijkl mnop", 1.0),
        (["abcd"], "", 0.0),
        (["one", "two"], "one\ntwx", 5 / 6),
        (["Don’t"], "don't", 1.0),
    ],
)
def test_the_formula(targets, read, reward):
    assert likeness([normalised(target) for target in targets], normalised(read)) == pytest.approx(reward)


def drawn(*lines: str) -> Image.Image:
    image = Image.new("RGB", (300, 50 + 44 * len(lines)), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(image).text((20, 20 + 44 * number), line, fill="black", font=ImageFont.load_default(30))
    return image


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def test_text_in_images_is_read_without_a_network(offline):
    rewards = RewardSet({"name": "text", "reward_model": "OCR", "batch_size": 2, "on_failure": "mask"})
    images = [("HELLO", "WORLD"), ("open 24 hours", "Joe's Cafe"), (), ("JELLO",), ("a",), ()]
    prompts = ['a sign "HELLO WORLD"', "a poster ‘Joe's Cafe’ and ‘open 24 hours’", *['a sign "HELLO"'] * 2]
    scored = rewards(prompt=[*prompts, "a sign", 'a sign ""'], image=[drawn(*lines) for lines in images])
    assert scored.rewards["text"][:4].tolist() == [1.0, 1.0, 0.0, 0.8]
    assert sorted(scored.failures["text"]) == [4, 5]
    assert "no text between quotes" in scored.failures["text"][4]
    assert scored.info["text"][0]["read"] == "HELLO\nWORLD"


def test_of_a_video_every_fourth_frame_is_read():
    reward = RewardSet({"name": "text", "reward_model": "ocr"})
    frames = [drawn("HELLO"), *[drawn("WRONG")] * 3, drawn("JELLO"), *[drawn("WRONG")] * 3, drawn()]
    scored = reward(prompt=['a sign "HELLO"'] * 2, video=[frames, frames[1:4]])
    assert scored.rewards["text"].tolist() == pytest.approx([(1.0 + 0.8) / 2, 0.0])
    assert scored.info["text"][0]["read"] == "HELLO\n\nJELLO\n\n"
    with pytest.raises(RewardError, match="has no image or video"):
        reward(prompt=['a sign "HELLO"'])


def test_without_quotes_the_whole_prompt_can_be_meant():
    rewards = RewardSet({"name": "text", "reward_model": "ocr", "without_quotes": "prompt"})
    assert rewards(prompt=["Hello"], image=[drawn("HELLO")]).rewards["text"].tolist() == [1.0]
    with pytest.raises(RewardError, match="sample 0: there is no text between"):
        rewards(prompt=[" "], image=[drawn("HELLO")])
