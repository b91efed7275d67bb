"""What a chat template rendered becomes the conversation again."""

from __future__ import annotations

import json

import pytest

from vlmrm.data.messages import to_messages
from vlmrm.errors import RowError
from vlmrm.modeling.tiny import ARCHITECTURES, make_tiny
from vlmrm.rendering import Renderer
from vlmrm.scoring.rendered_text import messages_of

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
    messages = to_messages(conversation, "user")
    images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    rendered = renderer.text(messages)
    again = messages_of(around.format(rendered.replace("<|image_pad|>", "<|image_pad|>" * 16)), images)
    assert renderer.text(again) == rendered
    assert [p["image"] for m in again for p in m["content"] if p["type"] == "image"] == images


def test_media_that_are_no_list_are_refused():
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\nA<|im_end|>"
    )
    for images in ("a.png", 5, {"a": 1}):
        with pytest.raises(RowError, match="no list"):
            messages_of(text, images)


def test_json_is_read_with_its_images():
    turns = [{"role": "user", "content": "<image>Why?"}, {"role": "assistant", "content": "So."}]
    [user, _] = messages_of(json.dumps({"messages": turns, "images": ["a.png"]}))
    assert user["content"] == [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Why?"}]
    assert messages_of(json.dumps(CONVERSATIONS[0])) == to_messages(CONVERSATIONS[0], "user")


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
        messages_of(text)
