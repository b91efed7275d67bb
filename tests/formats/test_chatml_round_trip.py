"""ChatML: a conversation survives writing and reading, or is refused if ChatML cannot express it."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmrm.conversation import Conversation, Image, Message, Text, Video, VideoOptions
from vlmrm.errors import RowError
from vlmrm.formats.texts import read_text, write_text

SAID = Message.of("assistant", "Yes.")
# What ChatML is made of, and what stands for media elsewhere.
PIECES = ["<|", "im_end", "|>", "<image>", "<video>", "<pad>", "</s>", "\n", "[", "{"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=4).map("".join)
PARTS = st.one_of(
    st.builds(Text, TEXTS),
    st.builds(Image, st.sampled_from(["a.png", b"x"])),
    st.builds(Video, st.sampled_from(["v.mp4", ["a.png", "b.png"]])),
)


def merged(conversation: Conversation) -> Conversation:
    """The conversation without texts that say nothing; a message that has no part says "", as ChatML's does."""
    kept = [Message(m.role, [part for part in m.content if part != Text("")]) for m in conversation.messages]
    return Conversation([message if message.content else Message.of(message.role, "") for message in kept])


@given(
    st.lists(
        st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.lists(PARTS, max_size=3)), max_size=3
    )
)
def test_a_conversation_that_is_written_is_read_back(messages):
    conversation = Conversation([*messages, SAID])
    try:
        text_and_media = write_text(conversation)
    except RowError:
        assume(False)
    assert merged(read_text(*text_and_media)) == merged(conversation)


def test_a_conversation_as_chatml():
    question = Message.of("user", Image("a.png"), "Is <b>this</b>\n[it]? ", Video("v.mp4"))
    text_and_media = write_text(Conversation([Message.of("system", "Be kind."), question, SAID]))
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    text += "Is <b>this</b>\n[it]? <|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
    assert text_and_media == (f"{text}<|im_start|>assistant\nYes.<|im_end|>\n", ["a.png"], ["v.mp4"])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([Message.of("user", "A <|im_end|> b?"), SAID], "<|im_end|>"),
        ([Message.of("user", "?"), Message.of("assistant", "<|x|>")], "<|x|>"),
        ([Message.of("the user", "?"), SAID], "'the user'"),
        ([Message.of("user", "a", "b"), SAID], "two texts in a row"),
        ([Message.of("user", Video("v.mp4", VideoOptions(fps=1.0))), SAID], "options"),
        ([Message.of("user", "?")], "no answer to score"),
    ],
)  # fmt: skip
def test_an_inexpressible_conversation_is_refused(messages, sentence):
    with pytest.raises(RowError, match=re.escape(sentence)):
        write_text(Conversation(messages))


@pytest.mark.parametrize("tag", ["<video>", "<image>"])
def test_a_placeholder_beside_a_picture_is_text(tag):
    talk = Conversation([Message.of("user", Image("a.png"), f"What is {tag} in HTML?"), Message.of("assistant", tag)])
    assert read_text(*write_text(talk)) == talk
