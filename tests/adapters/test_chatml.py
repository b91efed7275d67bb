"""What a chat template rendered becomes the conversation again."""

from __future__ import annotations

import json

import pytest

from vlmrm.conversation import Image, Text, media_of
from vlmrm.errors import RowError
from vlmrm.formats.openai import read_conversation
from vlmrm.formats.texts import read_text
from vlmrm.modeling.tiny import ARCHITECTURES, make_tiny
from vlmrm.rendering import Renderer

CONVERSATIONS = [
    [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.\n\nIndeed."}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "Which <b>?"}]},
        {"role": "assistant", "content": "Both [1]"},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "image": "b"}]},
        {"role": "assistant", "content": ""},
    ],
    [{"role": "user", "content": "Draw"}, {"role": "assistant", "content": [{"type": "image", "image": "c"}]}],
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def renderer(request, tmp_path_factory):
    from vlmrm.modeling import load_processor

    return Renderer(load_processor(make_tiny(tmp_path_factory.mktemp("tiny"), request.param)))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("around", ["{}", "<|endoftext|><|endoftext|>{}<|endoftext|>"])
def test_rendered_again_it_is_the_same(renderer, conversation, around):
    messages = read_conversation(conversation).messages
    images = [medium.reference for medium in media_of(messages)]
    rendered = renderer.text(messages)
    again = read_text(around.format(rendered.replace("<|image_pad|>", "<|image_pad|>" * 16)), images).messages
    assert renderer.text(again) == rendered
    assert [medium.reference for medium in media_of(again)] == images


def test_json_is_read_with_its_images():
    turns = [{"role": "user", "content": "<image>Why?"}, {"role": "assistant", "content": "So."}]
    [user, _] = read_text(json.dumps({"messages": turns, "images": ["a.png"]})).messages
    assert user.content == (Image("a.png"), Text("Why?"))
    assert read_text(json.dumps(CONVERSATIONS[0])) == read_conversation(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Why? So.", "no conversation"),
        ("Hear: <|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>", "no conversation"),
        ("<|im_start|>user\nWhy?<|im_end|>\n", "ends without an assistant message"),
        ("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>", "more images than the row has"),
        ('{"images": []}', "has no messages"),
        ("[" * 100_000, "looks like JSON"),
    ],
)
def test_what_is_no_conversation_is_refused(text, reason):
    with pytest.raises(RowError, match=reason):
        read_text(text)
