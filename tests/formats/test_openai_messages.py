"""OpenAI's messages, Hugging Face's parts and ShareGPT's names are read whole or refused by name, and written back."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from vlmrm.conversation import SAMPLING, Conversation, Image, Message, Text, Video, VideoOptions
from vlmrm.errors import MediaError, RowError
from vlmrm.formats.openai import REFUSED_IN_MESSAGE, read_conversation, read_messages, read_reference, write_messages


def read_part(part) -> object:
    [message] = read_messages({"role": "user", "content": [part]}, "user")
    [read] = message.content
    return read


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("Look.", Text("Look.")),
        ({"type": "text", "text": "q", "image": ""}, Text("q")),
        ({"type": "text", "text": "", "image": None}, Text("")),
        ({"type": "image", "image": "a.png", "text": None, "video": None, "index": 0, "uuid": "1"}, Image("a.png")),
        ({"type": "image", "text": ""}, Image()),
        ({"type": "image", "url": "a.png"}, Image("a.png")),
        ({"type": "image", "path": "a.png"}, Image("a.png")),
        ({"type": "image", "bytes": b"x", "path": None}, Image(b"x")),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}}, Image("a.png")),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}, "cache_control": {}}, Image("a.png")),
        ({"image_url": "a.png"}, Image("a.png")),
        ({"type": "video"}, Video()),
        ({"type": "video", "video": "v.mp4", "duration": 3.5}, Video("v.mp4")),
        ({"type": "video", "path": "v.mp4", "fps": 1.0}, Video("v.mp4", VideoOptions(fps=1.0))),
        ({"type": "video_url", "video_url": {"url": "v.mp4", "fps": 1.0}}, Video("v.mp4", VideoOptions(fps=1.0))),
        ({"type": "video", "video": "v.mp4", "fps": None, "nframes": 4}, Video("v.mp4", VideoOptions(nframes=4))),
        ({"type": "video", "video": ["a.png", {"bytes": b"x"}]}, Video(("a.png", b"x"))),
        (Image("a.png"), Image("a.png")),
    ],
)
def test_a_part_in_any_spelling_gets_its_type(part, expected):
    assert read_part(part) == expected


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "image", "image": "a.png", "max_pixels": 3136}, "an image part has `max_pixels`"),
        ({"image_url": {"url": "a.png", "detail": "high"}}, "an image part has `detail`"),
        ({"type": "image", "image": "a.png", "url": "b.png"}, "holds image and url"),
        ({"image": "a.png", "video": "v.mp4"}, "holds image and video"),
        ({"type": "image", "text": "Look."}, "holds image and text"),
        ({"type": "video", "video": "v.mp4", "frames": 4}, "a video part has `frames`"),
        ({"type": "video", "video": "v.mp4", "fps": "2"}, "fps of a video is '2'"),
        ({"type": "input_audio", "input_audio": {}}, "must hold text, an image or a video"),
        ({"type": "audio", "audio": "a.wav", "text": "q"}, "`audio`"),
        ({"text": "q", "input_audio": {"data": "x"}}, "`input_audio`"),
        ({"type": "text", "text": None}, "must hold text, an image or a video"),
        ({"type": "text", "text": 3}, "must be a text, got 3"),
        (3, "must be a text or an object, got 3"),
    ],
)
def test_an_unread_key_of_a_part_is_named(part, sentence):
    with pytest.raises((RowError, MediaError), match=re.escape(sentence)):
        read_part(part)


@pytest.mark.parametrize("key", REFUSED_IN_MESSAGE)
def test_content_outside_of_content_is_named(key):
    message = {"role": "assistant", "content": "The weather is fine."}
    for content in ("The weather is fine.", None):
        with pytest.raises(RowError, match=f"an assistant message has `{key}`, which is not read"):
            read_messages([{"role": "assistant", "content": content, key: [{"id": "call-1"}]}], "user")
    for nothing in (None, [], "", np.array([])):
        assert read_messages([{**message, key: nothing}], "user") == (Message.of("assistant", message["content"]),)


def test_other_keys_of_a_message_are_metadata():
    message = {"role": "user", "content": "Hello.", "id": "m1", "timestamp": 3, "loss": True, "weight": 0.5}
    assert read_messages(message, "user") == (Message.of("user", "Hello."),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Hello.", Message.of("user", "Hello.")),
        ({"content": "Hello."}, Message.of("user", "Hello.")),
        ({"from": "gpt", "value": "Hello."}, Message.of("assistant", "Hello.")),
        ([{"from": "human", "value": "Hello."}], Message.of("user", "Hello.")),
        ({"role": "tool", "content": ["Hello."]}, Message.of("tool", "Hello.")),
        (Message.of("system", "Hello."), Message.of("system", "Hello.")),
    ],
)
def test_names_of_roles_and_keys(value, expected):
    assert read_messages(value, "user") == (expected,)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "got []"),
        (b"Hello.", "got b'Hello.'"),
        (["Hello."], "`role` and `content`, got 'Hello.'"),
        ([{"role": 3, "content": "Hello."}], "role of a message must be a text, got 3"),
        ([{"role": "user"}], "content of a user message"),
        ([{"role": "assistant", "content": 3}], "content of an assistant message"),
    ],
)
def test_an_invalid_message_is_named(value, sentence):
    with pytest.raises(RowError, match=re.escape(sentence)):
        read_messages(value, "user")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("Hello.", "a single str"),
        ({"role": "user", "content": "Hello."}, "a single dict"),
        ([{"role": "user", "content": [{"type": "image"}]}], "empty image part"),
        ([{"role": "user", "content": [{"type": "video"}]}], "empty video part"),
    ],
)
def test_an_invalid_conversation_is_named(value, sentence):
    with pytest.raises(RowError, match=re.escape(sentence)):
        read_conversation(value)


def test_a_conversation_stays_itself():
    talk = Conversation([Message.of("user", "Hello.")])
    assert read_conversation(talk) is talk and read_conversation(talk.messages) == talk


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.png", "a.png"),
        (b"x", b"x"),
        (None, None),
        ({"bytes": None, "path": None}, None),
        ({"path": "a.png"}, "a.png"),
        ({"bytes": b"", "path": "a.png"}, b""),
        ([{"path": "a.png"}, "b.png"], ("a.png", "b.png")),
    ],
)
def test_a_reference_is_bytes_or_else_a_path(value, expected):
    assert read_reference(value) == expected


# What is written is read back ----------------------------------------------------------------------------------------

REFERENCES = st.one_of(
    st.text(min_size=1), st.binary(), st.builds(Path, st.just("a.png")), st.just(Pillow.new("RGB", (2, 2)))
)
NAMES = [option.name for option in dataclasses.fields(VideoOptions) if option.name not in ("min_pixels", "max_pixels")]
SINGLE = [name for name in NAMES if not name.startswith("resized_")]
NUMBERS = st.floats(1e-6, 1e12) | st.integers(1, 10**12)


def options_of(names):
    return st.dictionaries(st.sampled_from(names), NUMBERS).map(lambda options: VideoOptions(**options))


CLIPS = st.builds(Video, REFERENCES | st.none(), options_of(SINGLE))
OF_FRAMES = [name for name in SINGLE if name not in SAMPLING]
FRAMES = st.builds(Video, st.lists(REFERENCES, max_size=3), options_of(OF_FRAMES))
MEDIA = st.builds(Image, REFERENCES | st.none()) | CLIPS | FRAMES
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.lists(st.builds(Text, st.text()) | MEDIA, max_size=4),
)


@given(st.lists(MESSAGES, min_size=1, max_size=4).map(tuple))
def test_messages_that_are_written_are_read_back(messages):
    assert read_messages(write_messages(messages), "user") == messages
