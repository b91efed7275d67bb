"""ChatML: a conversation survives writing, as a chat template writes it, and reading."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmrm.conversation import Conversation, Image, Message, Text, Video, media_of
from vlmrm.formats.texts import read_text

SAID = Message.of("assistant", "Yes.")
# What ChatML is made of, and what stands for media elsewhere.
PIECES = ["<|", "im_end", "|>", "<image>", "<video>", "<pad>", "</s>", "\n", "[", "{"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=4).map("".join)
PARTS = st.one_of(
    st.builds(Text, TEXTS),
    st.builds(Image, st.sampled_from(["a.png", b"x"])),
    st.builds(Video, st.sampled_from(["v.mp4", ["a.png", "b.png"]])),
)


def written(conversation: Conversation) -> tuple[str, list, list]:
    """The text of a conversation, and its images and videos in order."""

    def content(part) -> str:
        return part.text if isinstance(part, Text) else f"<|vision_start|><|{part.kind}_pad|><|vision_end|>"

    text = "".join(
        f"<|im_start|>{message.role}\n{''.join(map(content, message.content))}<|im_end|>\n"
        for message in conversation.messages
    )
    media = media_of(conversation.messages)
    return text, *([it.reference for it in media if it.kind == kind] for kind in ("image", "video"))


def merged(conversation: Conversation) -> list[tuple]:
    """The conversation with texts in a row as one, and without those that say nothing."""
    messages = []
    for message in conversation.messages:
        parts: list = []
        for part in message.content:
            both = isinstance(part, Text) and bool(parts) and isinstance(parts[-1], Text)
            parts = [*parts[:-1], Text(parts[-1].text + part.text)] if both else [*parts, part]
        messages.append((message.role, [part for part in parts if part != Text("")]))
    return messages


@given(
    st.lists(
        st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.lists(PARTS, max_size=3)), max_size=3
    )
)
def test_a_conversation_that_is_written_is_read_back(messages):
    conversation = Conversation([*messages, SAID])
    assume("<|" not in "".join(message.text for message in messages))
    assert merged(read_text(*written(conversation))) == merged(conversation)


@pytest.mark.parametrize("tag", ["<video>", "<image>"])
def test_a_placeholder_beside_a_picture_is_text(tag):
    talk = Conversation([Message.of("user", Image("a.png"), f"What is {tag} in HTML?"), Message.of("assistant", tag)])
    assert read_text(*written(talk)) == talk
